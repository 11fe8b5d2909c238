"""The smaller pages: settings, diagnostics, server."""
