"""Numbers: kernels, weight formats, pages, threads, the machine. Knows no model and no text."""
