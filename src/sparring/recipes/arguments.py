"""Descriptions of the recipes' own arguments."""
def description(recipe, name): return ""
