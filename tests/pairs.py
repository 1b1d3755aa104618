"""Tables of test cases that cross several options without running their whole product."""

from itertools import combinations, product


def pairs(**dimensions):
    """Return few cases, tuples of one value of each dimension, such that any two values of two dimensions occur
    together in a case."""
    values = [list(each) for each in dimensions.values()]
    every = {case: set(combinations(enumerate(case), 2)) for case in product(*(range(len(each)) for each in values))}
    missing, found = set().union(*every.values()), []
    while missing:
        best = max(every, key=lambda case: len(every[case] & missing))
        missing -= every[best]
        found.append(best)
    return [tuple(each[n] for each, n in zip(values, case, strict=True)) for case in found]
