"""Tables, plots and pages made from what a run wrote."""
