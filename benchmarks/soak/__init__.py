"""A fleet under continuous generation while weights change and processes die (see __main__)."""
