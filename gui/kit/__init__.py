"""What every page is made of: theme, icons, language, controls, words."""
