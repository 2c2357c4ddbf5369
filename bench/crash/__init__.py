"""A small campaign that can be killed, lose power and meet broken disks, and the count of what that cost."""
