"""Reports: measurements -> figures -> one self-contained page. They compute nothing, and know measurements only."""
