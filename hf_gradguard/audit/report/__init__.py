"""What an audit says, drawn from its cells: verdicts, tables, and the page to look at."""
