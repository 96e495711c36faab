"""Core is pure: its tests need neither a database nor a clock."""
