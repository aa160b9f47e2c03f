"""The model and its paged memory, shared by both compute pools."""
