"""The peers that hpcrl is measured against: raw files, other stores, other broadcasts."""
