"""Who runs, what is drawn, when it stops."""
