// Quantized weights in the forward whole-sequence kernel with the product in lanes: which weights each lane reads, and
// in which order. fused_arrange.metal stores them in this order. quantized.metal describes the format.
//
// GROUP lanes of a simdgroup share a product. A lane has SPAN neighbouring weights of each of SLOTS rows of Wh; a row
// is one gate of one unit, and its index in a lane is called a slot. The weights of a row are divided into PIECES
// pieces; a piece of a row lies in one quantization group of SIZE weights, so its weights have the same scale and bias.
// A weight takes FIELD bits: 4, or 8 if it has more than 4 bits. So eight weights fill WORDS = FIELD / 4 words of 32
// bits. The words of a lane are stored in the order in which it needs them, piece after piece. A piece consists of EACH
// words, first OF_WEIGHTS with weights, then SLOTS * FACTORS with scales and biases:
//   - eight weights of every row, then the next eight weights of every row, and so on to the end of the piece
//   - the scale and, if BIASED, the bias of every row, as floats
// A lane reads COUNT vectors of 4 words. The first RESIDENT of them stay in registers (`resident`); it reads the others
// (`streamed`) at every step.
//
// A weight is scale * q + bias with an integer q, or scale * q with a small float q if not BIASED. number_at(words, e)
// returns q of weight e in a form that of_group, which applies scale and bias, understands (quantized.metal). LENGTH:
// the weights of a whole row. ROWS: the batch items of a threadgroup; r counts them.

// The type V of weights that selects the functions of this file: a vector of 4 words with quantized weights. The
// template parameters do not change its contents; they tell these functions how to read the words.
template <int FIELD, int SIZE, bool BIASED>
struct PackedVector {
  uint4 words;
};

// How many weights and words a lane has of LENGTH weights in each row, which GROUP lanes share. PIECES pieces of PIECE
// weights of each row; FACTORS scales and biases per row and piece; EACH words per piece, of which OF_WEIGHTS hold
// weights (eight weights fill WORDS words). COUNT: vectors of 4 words, rounded up. RUNS: runs of 4 numbers that a
// lane reads of x, the vector that the weights multiply (the masked h).
template <int FIELD, int SIZE, bool BIASED, int LENGTH, int GROUP, int SLOTS>
struct LaneShare<PackedVector<FIELD, SIZE, BIASED>, LENGTH, GROUP, SLOTS> {
  enum {
    NEEDED = (LENGTH + GROUP - 1) / GROUP,
    // A lane needs at least NEEDED weights of each row, so that the lanes together have the whole row. SPAN is the next
    // power of two, at least 8, because lanes read eight weights at a time. 128 is enough: a threadgroup has at most
    // 1024 threads, so H <= 1024, and GROUP is 8. It is a power of two, because the size of a quantization group is one
    // too: a lane's weights then lie in one group, or fill whole groups.
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

// Load the first RESIDENT vectors of a lane into registers. They lie 32 vectors apart, because those of the 32 lanes of
// the simdgroup lie side by side. This is the overload for quantized weights.
template <int RESIDENT, int FIELD, int SIZE, bool BIASED, int COUNT>
void load_resident(
    const device PackedVector<FIELD, SIZE, BIASED>* streamed,
    thread PackedVector<FIELD, SIZE, BIASED> (&resident)[COUNT]) {
#pragma clang loop unroll(full)
  for (int n = 0; n < RESIDENT; ++n) resident[n].words = streamed[32 * n].words;
}

// What a lane remembers while it reads its words in order. The words lie in vectors of 4. resident: the vectors in
// registers. streamed: all vectors, in memory. words: the vector that was read last. vector: the index of this vector.
template <class V>
struct Words {
  thread const V* resident;
  const device V* streamed;
  uint4 words;
  int vector;
};

// Return word number `word` of a lane, whose words are read in order. The vector of 4 words that contains it is read
// once, from registers if it is one of the first RESIDENT, and stays in `lane`, with its number lane.vector, for the
// next words.
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

// Select the type of biases for the functions of quantized.metal: float, or Absent if the weights have no biases.
template <bool BIASED> struct Biases { using type = float; };
template <> struct Biases<false> { using type = Absent; };

// A lane computes with several rows of the weights, one per slot. For each batch item r and each slot, multiply eight
// neighbouring weights of the slot's row by the same eight numbers of x, and add the products to products[r][slot].
// Also add the eight numbers of x to x_sums[r]: the caller multiplies this sum by the biases of the weights. first: the
// index of the first of the lane's words that contain these weights. x: two vectors of 4, GROUP vectors apart, for each
// item; items are STRIDE vectors apart. Slots whose bit (slot % PER) in WANTED is 0 are skipped: not every product
// needs all gates. PER: the slots of a unit, one per gate.
template <int ROWS, int SLOTS, int GROUP, int PER, int WANTED, int RESIDENT, int STRIDE, int FIELD, int SIZE,
    bool BIASED>
void add_eight(
    thread float (&products)[ROWS][SLOTS], thread float (&x_sums)[ROWS], int first,
    thread Words<PackedVector<FIELD, SIZE, BIASED>>& lane, threadgroup const float4* x) {
  constexpr int WORDS = FIELD / 4;
  const typename Biases<BIASED>::type biases = {};  // only its type is read
  float operands[ROWS][8];
#pragma clang loop unroll(full)
  for (int part = 0; part < 8 * ROWS; ++part) {
    const int r = part / 8, e = part % 8;
    operands[r][e] = x[r * STRIDE + e / 4 * GROUP][e % 4];
    x_sums[r] += operands[r][e];
  }
#pragma clang loop unroll(full)
  for (int v = 0; v < SLOTS; ++v) {
    if (!((WANTED >> (v % PER)) & 1)) continue;
    uint words[WORDS];
#pragma clang loop unroll(full)
    for (int n = 0; n < WORDS; ++n) words[n] = word_at<RESIDENT>(lane, first + v * WORDS + n);
#pragma clang loop unroll(full)
    for (int part = 0; part < 8 * ROWS; ++part) {
      const int e = part / ROWS, r = part % ROWS;
      products[r][v] += operands[r][e] * number_at<FIELD>(words, e, biases);
    }
  }
}

// Add a lane's part of a product with quantized weights to sums[r][slot], for batch item r and row `slot` of the lane's
// weights. All weights of a row in one piece have the same scale and bias. So for each piece the function adds up x,
// and x times q (as number_at returns it). Then of_group applies scale and bias to both sums. The parameters are those
// of add_product in fused_lanes.metal: x, the operand of the first item from the lane's first run on; items STRIDE
// vectors apart; PER slots per unit, of which those with a bit in WANTED are needed; FROM is always 0 here. RUNS runs
// of 4 numbers of x per lane give the padded length of a row, 4 GROUP RUNS. -1: no vector of words has been read yet.
template <int ROWS, int SLOTS, int RUNS, int GROUP, int FROM, int PER, int WANTED, int RESIDENT, int STRIDE, int FIELD,
    int SIZE, bool BIASED>
void add_product(
    thread float (&sums)[ROWS][SLOTS], thread const PackedVector<FIELD, SIZE, BIASED>* resident,
    const device PackedVector<FIELD, SIZE, BIASED>* streamed, threadgroup const float4* x) {
  using Share = LaneShare<PackedVector<FIELD, SIZE, BIASED>, 4 * GROUP * RUNS, GROUP, SLOTS>;
  constexpr int EIGHTS = Share::PIECE / 8, FACTORS = Share::FACTORS;
  Words<PackedVector<FIELD, SIZE, BIASED>> lane = {resident, streamed, uint4(0), -1};
  const typename Biases<BIASED>::type biases = {};  // only its type is read
#pragma clang loop unroll(full)
  for (int piece = 0; piece < Share::PIECES; ++piece) {
    const int first = piece * Share::EACH;
    float products[ROWS][SLOTS] = {}, x_sums[ROWS] = {};
#pragma clang loop unroll(full)
    for (int n = 0; n < EIGHTS; ++n)
      add_eight<ROWS, SLOTS, GROUP, PER, WANTED, RESIDENT, STRIDE>(
          products, x_sums, first + n * SLOTS * Share::WORDS, lane, x + 2 * GROUP * (piece * EIGHTS + n));
#pragma clang loop unroll(full)
    for (int v = 0; v < SLOTS; ++v) {
      if (!((WANTED >> (v % PER)) & 1)) continue;
      const int factor = first + Share::OF_WEIGHTS + v * FACTORS;
      const float scale = as_type<float>(word_at<RESIDENT>(lane, factor));
      const float bias = BIASED ? as_type<float>(word_at<RESIDENT>(lane, factor + 1)) : 0.0f;
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) sums[r][v] += of_group<FIELD>(products[r][v], x_sums[r], scale, bias, biases);
    }
  }
}
