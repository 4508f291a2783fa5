"""Where requests run: the line, the prefix index, and the choice among workers. Pure but for the
line: nothing here knows messages.
"""
