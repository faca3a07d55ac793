"""A fleet as a client sees it: the same verbs over a supervisor's socket or to attached servers."""
