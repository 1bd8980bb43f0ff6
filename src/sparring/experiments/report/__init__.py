"""Reports: tables, figures and self-contained HTML pages of comparisons, diagnoses and clusters.

Modules here read finished results; they neither train nor measure.
"""
