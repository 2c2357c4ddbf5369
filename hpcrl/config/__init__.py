"""The user's files: recipes and sites.

toml       TOML files to structs: found, extended, overridden, checked
recipe     the tables of a recipe
site       one machine: partitions, network, software
program    the limits and paths of an agent program
pipeline   the learning DAG that a recipe asks for
user_code  load functions and classes named `package.module:name`
"""
