// Where an element stands in its array, for arrays of less than 2^31 elements.
using Index = int;
