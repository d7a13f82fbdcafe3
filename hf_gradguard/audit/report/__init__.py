"""The report of an audit, drawn from its cells: verdicts, tables, and a page."""
