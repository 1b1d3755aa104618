// Where an element stands in its array, for arrays of any size.
using Index = long;
