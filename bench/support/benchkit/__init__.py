"""What the benchmark scripts share. Each puts this folder's parent on the import path itself."""
