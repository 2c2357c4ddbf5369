"""What a user writes, and what it means.

toml       find, extend, override and refuse TOML files
recipe     the tables of a recipe
site       one machine: partitions, network, software
pipeline   the learning DAG that a recipe asks for
user_code  functions and classes named `package.module:name`
"""
