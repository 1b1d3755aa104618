// Quantized weights in the forward kernel that runs all time steps in one launch and divides the product among lanes.
// This file defines which weights each lane reads, and in which order. fused_arrange.metal copies the weights into this
// order. quantized.metal describes the format of the weights.
//
// GROUP lanes of a simdgroup share a product. A lane has SPAN neighbouring weights of each of SLOTS rows of Wh. A row
// belongs to one gate of one unit; its index in a lane is called a slot. A lane divides its weights of a row into
// PIECES pieces. A piece lies in one quantization group of SIZE weights, so its weights have the same scale and bias. A
// weight takes FIELD bits: 4, or 8 if it has more than 4 bits. So eight weights fill WORDS = FIELD / 4 words of 32
// bits. The words of a lane are stored in the order in which it needs them, piece after piece. A piece of all rows has
// EACH words: OF_WEIGHTS words with weights, then SLOTS * FACTORS words with scales and biases:
//   - eight weights of every row, then the next eight weights of every row, and so on to the end of the piece
//   - the scale and, if BIASED, the bias of every row, as floats
// A lane reads COUNT vectors of 4 words. The first RESIDENT of them stay in registers (`resident`); it reads the others
// (`streamed`) at every step.
//
// A weight is scale * q + bias with an integer q or, if not BIASED, scale * q with a small float q. number_at(words, e)
// in quantized.metal returns a number from which q of weight e follows by a factor or an offset, because unpacking q
// itself takes more instructions; of_group applies scale and bias to a sum with such numbers. LENGTH: the number of
// weights in a whole row. ROWS: the batch items of a threadgroup; r counts them.

// A vector of 4 words with quantized weights. Kernels use it in place of a vector of 4 weights, and this type selects
// the functions of this file. The template parameters do not change the contents; they tell the functions how to read
// the words.
template <int FIELD, int SIZE, bool BIASED>
struct PackedVector {
  uint4 words;
};

// How many weights and words a lane has, if GROUP lanes share SLOTS rows of LENGTH weights each. A lane has SPAN
// weights of each row, in PIECES pieces of PIECE weights with the same scale. FIELD: the bits that hold a weight. FACTORS: the
// factors of a row in a piece: its scale and, if BIASED, its bias. EACH: the words of a piece of all SLOTS rows
// together: first OF_WEIGHTS words with weights (eight weights fill WORDS words), then the factors. COUNT: all words of
// a lane, in vectors of 4, rounded up. RUNS: how many runs of 4 numbers the lane reads of the vector that the weights
// multiply.
template <int FIELD, int SIZE, bool BIASED, int LENGTH, int GROUP, int SLOTS>
struct LaneShare<PackedVector<FIELD, SIZE, BIASED>, LENGTH, GROUP, SLOTS> {
  enum {
    NEEDED = (LENGTH + GROUP - 1) / GROUP,
    // A lane needs at least NEEDED weights of each row, so that the lanes together have the whole row. SPAN is NEEDED,
    // rounded up to a power of two and to at least 8, because lanes read eight weights at a time. The size of a
    // quantization group is a power of two, too. So a lane's weights lie in one quantization group of SIZE weights, or
    // fill whole groups. 128 is enough: a threadgroup has at most 1024 threads, so H <= 1024, and GROUP = 8 lanes share
    // a row.
    SPAN = NEEDED <= 8 ? 8 : NEEDED <= 16 ? 16 : NEEDED <= 32 ? 32 : NEEDED <= 64 ? 64 : 128,
    RUNS = SPAN / 4,
    PIECE = SPAN < SIZE ? SPAN : SIZE,
    PIECES = SPAN / PIECE,
    WORDS = FIELD / 4,
    FACTORS = BIASED ? 2 : 1,
    OF_WEIGHTS = SLOTS * WORDS * PIECE / 8,
    EACH = OF_WEIGHTS + SLOTS * FACTORS,
    COUNT = (PIECES * EACH + 3) / 4
  };
};

// Load the first RESIDENT vectors of a lane into registers; this is the overload for quantized weights.
template <int RESIDENT, int FIELD, int SIZE, bool BIASED, int COUNT>
void load_resident(
    const device PackedVector<FIELD, SIZE, BIASED>* streamed,
    thread PackedVector<FIELD, SIZE, BIASED> (&resident)[COUNT]) {
  UNROLL for (int n = 0; n < RESIDENT; ++n) resident[n].words = streamed[32 * n].words;
}

// The position of a lane that reads its words in order. words: the vector of 4 words that was read last. vector: the
// index of this vector.
template <class V>
struct Words {
  thread const V* resident;
  const device V* streamed;
  uint4 words;
  int vector;
};

// Return word number `word` of a lane, which reads its words in order. The function reads the vector of 4 words that
// contains this word, from registers if it is one of the first RESIDENT vectors. The vector stays in lane.words for the
// next calls, so that it is read only once. lane.vector: the index of this vector.
template <int RESIDENT, class V>
uint word_at(thread Words<V>& lane, int word) {
  const int n = word / 4;
  if (n != lane.vector) {
    if (n < RESIDENT) lane.words = lane.resident[n].words;
    else lane.words = lane.streamed[32 * n].words;
  }
  lane.vector = n;
  return lane.words[word % 4];
}

// The type of the argument `biases` for functions of quantized.metal: float, or Absent if the weights have no biases.
template <bool BIASED> struct Biases { using type = float; };
template <> struct Biases<false> { using type = Absent; };

// Multiply eight numbers of x by eight neighbouring weights of each row that the lane has, for each batch item r. (A
// row's index in the lane is its slot.) Add the results to products[r][slot], and the eight numbers of x to x_sums[r],
// because the caller multiplies this sum by the biases of the weights. first: the index of the first of the lane's
// words that contain these weights. x: two vectors of 4, GROUP vectors apart, for each batch item; items are STRIDE
// vectors apart. PER: the slots of a unit, one per gate. WANTED: one bit per gate; slots of other gates are skipped,
// because not every product needs all gates.
template <int ROWS, int SLOTS, int GROUP, int PER, int WANTED, int RESIDENT, int STRIDE, int FIELD, int SIZE,
    bool BIASED>
void add_eight(
    thread float (&products)[ROWS][SLOTS], thread float (&x_sums)[ROWS], int first,
    thread Words<PackedVector<FIELD, SIZE, BIASED>>& lane, threadgroup const float4* x) {
  constexpr int WORDS = FIELD / 4;
  const typename Biases<BIASED>::type biases = {};  // only its type is read
  float operands[ROWS][8];
  UNROLL for (int part = 0; part < 8 * ROWS; ++part) {
    const int r = part / 8, e = part % 8;
    operands[r][e] = x[r * STRIDE + e / 4 * GROUP][e % 4];
    x_sums[r] += operands[r][e];
  }
  UNROLL for (int v = 0; v < SLOTS; ++v) {
    if (!((WANTED >> (v % PER)) & 1)) continue;
    uint words[WORDS];
    UNROLL for (int n = 0; n < WORDS; ++n) words[n] = word_at<RESIDENT>(lane, first + v * WORDS + n);
    UNROLL for (int part = 0; part < 8 * ROWS; ++part) {
      const int e = part / ROWS, r = part % ROWS;
      products[r][v] += operands[r][e] * number_at<FIELD>(words, e, biases);
    }
  }
}

// Add a lane's part of a product with quantized weights to sums[r][slot], for batch item r and row `slot` of the lane's
// weights. The weights of a row are divided into pieces with one scale and bias each. For each piece the function adds
// up x, and x times the numbers that stand for the weights (number_at). Then of_group applies scale and bias to both
// sums. x: the first number of the operand that this lane multiplies, for batch item 0; items are STRIDE vectors apart.
// RUNS: how many runs of 4 numbers of x a lane multiplies, so a padded row has 4 GROUP RUNS weights. PER: the slots of
// a unit, one per gate; WANTED: one bit per gate; slots of other gates are skipped. FROM is 0 with quantized weights
// and not used. In `lane`, -1 means that no vector of words has been read yet.
template <int ROWS, int SLOTS, int RUNS, int GROUP, int FROM, int PER, int WANTED, int RESIDENT, int STRIDE, int FIELD,
    int SIZE, bool BIASED>
void add_product(
    thread float (&sums)[ROWS][SLOTS], thread const PackedVector<FIELD, SIZE, BIASED>* resident,
    const device PackedVector<FIELD, SIZE, BIASED>* streamed, threadgroup const float4* x) {
  using Share = LaneShare<PackedVector<FIELD, SIZE, BIASED>, 4 * GROUP * RUNS, GROUP, SLOTS>;
  constexpr int EIGHTS = Share::PIECE / 8, FACTORS = Share::FACTORS;
  Words<PackedVector<FIELD, SIZE, BIASED>> lane = {resident, streamed, uint4(0), -1};
  const typename Biases<BIASED>::type biases = {};  // only its type is read
  UNROLL for (int piece = 0; piece < Share::PIECES; ++piece) {
    const int first = piece * Share::EACH;
    float products[ROWS][SLOTS] = {}, x_sums[ROWS] = {};
    UNROLL for (int n = 0; n < EIGHTS; ++n)
      add_eight<ROWS, SLOTS, GROUP, PER, WANTED, RESIDENT, STRIDE>(
          products, x_sums, first + n * SLOTS * Share::WORDS, lane, x + 2 * GROUP * (piece * EIGHTS + n));
    UNROLL for (int v = 0; v < SLOTS; ++v) {
      if (!((WANTED >> (v % PER)) & 1)) continue;
      const int factor = first + Share::OF_WEIGHTS + v * FACTORS;
      const float scale = as_type<float>(word_at<RESIDENT>(lane, factor));
      const float bias = BIASED ? as_type<float>(word_at<RESIDENT>(lane, factor + 1)) : 0.0f;
      UNROLL for (int r = 0; r < ROWS; ++r)
        sums[r][v] += of_group<FIELD>(products[r][v], x_sums[r], scale, bias, biases);
    }
  }
}
