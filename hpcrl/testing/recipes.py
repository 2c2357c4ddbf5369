"""A recipe by its name, without what depends on this machine (`load_recipe`)."""

from hpcrl.config.recipe import Recipe, make_recipe
from hpcrl.config.toml import load_table


def load_recipe(name: str, *, settings: tuple[str, ...] = ()) -> Recipe:
    """Load the recipe with this name or path, with `-s key=value` settings applied."""
    return make_recipe(load_table("recipes", name, settings=settings))
