"""Pictures of plans: in the terminal, in a browser, with matplotlib, and as a trace."""
