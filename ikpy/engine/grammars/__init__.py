"""Grammars that answers follow: GBNF, JSON schema, regular expressions, and the budget of reasoning."""
