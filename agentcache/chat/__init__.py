"""A chat in the terminal, with sessions that can be forked, rewound and explained."""
