"""What the spool is measured against: raw files, and the stores that people use instead."""
