"""Where requests run: the line, and the choice among workers. Pure but for the
line: nothing here knows messages.
"""
