"""The live page: runs under a folder, read as they are written, served to this machine."""
