"""Agent programs to start from; each is an ordinary program that does not use hpcrl.

sums          adds numbers
repositories  makes small repositories with bugs to repair
answer_files  the files with the answers, which programs are not shown
"""
