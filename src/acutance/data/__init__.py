"""Data inside the package: `prose.txt`, a page of English, read when the caller gives no text."""
