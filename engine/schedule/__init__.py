"""What each step computes, and what came of it. Values in, values out: nothing computes here."""
