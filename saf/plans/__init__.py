"""Plans: a file that says what brokers are to have, compared with what they have, and applied.

`tables` has what a plan may hold; `file` reads and writes plans; `difference` compares and applies.
"""
