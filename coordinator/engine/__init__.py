"""The verbs: admit, gather, decide, fence, commit, dispatch, in that order; recover and schedule around them."""
