"""Bundled data: `prose.txt`, a page of English text, the default text of the command."""
