"""Components: one reuse rule per layer kind, composable on one tree."""
