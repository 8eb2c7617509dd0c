"""Commands that need no job: check, measure, what-if, report. Nothing in training imports them."""
