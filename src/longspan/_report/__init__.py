"""Views of a plan's report: text for the terminal, an HTML page, a matplotlib figure, a trace for Perfetto."""
