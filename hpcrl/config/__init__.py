"""The user's files: recipes and sites.

toml       TOML files to structs: found, extended, overridden, checked
recipe     the tables of a recipe
site       one machine: partitions, network, software
program    the limits and paths of an agent program
pipeline   the learning DAG that a recipe asks for
published_dtype  the dtype of the weights that engines are sent
published_adapters  the choice to send them adapters alone
engine_speed  the speed of the engines by the cost model
key_table  every key with its type, default and meaning, for help and documents
user_code  load functions and classes named `package.module:name`
"""
