"""What every experiment needs: claims and rows, the run and its record, tables, random rows."""
