"""From measurements to decisions: pure functions that know neither ranks nor frameworks."""
