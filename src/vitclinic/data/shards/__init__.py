"""Shards: files of many images each, here or elsewhere, for data that fits no disk."""
