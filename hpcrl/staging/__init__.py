"""Files that campaigns need on the file system of a site, brought there from a login node: `hpcrl stage`.

stage        what a recipe names: models, data files, images
image_definition    the definition of an image with hpcrl: `hpcrl image`
hub_files    files of the hub: listed, fetched, checked
"""
