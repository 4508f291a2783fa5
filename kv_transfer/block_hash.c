// The chain of block hashes of a prompt: BLAKE2b (RFC 7693) of 16 bytes over the parent's hash and the
// block's tokens, as hashlib computes it. Each hash needs the one before, so the four columns of one
// state are computed side by side, not several blocks. Little-endian machines only.
#include <stdint.h>
#include <string.h>

enum { HASH_BYTES = 16, CHUNK_BYTES = 128 };

typedef uint64_t Row __attribute__((vector_size(32)));

static const uint64_t IV[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                               0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                               0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

#define ROTATED(x, n) ((x) >> (n) | (x) << (64 - (n)))
#define WORDS(i, j, k, l) ((Row){m[i], m[j], m[k], m[l]})
#define MIX(x, y)                                                                               \
  a += x; a += b; d = ROTATED(d ^ a, 32); c += d; b = ROTATED(b ^ c, 24);                       \
  a += y; a += b; d = ROTATED(d ^ a, 16); c += d; b = ROTATED(b ^ c, 63);
#define LANES(row, i, j, k, l) row = __builtin_shufflevector(row, row, i, j, k, l);
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)             \
  MIX(WORDS(s0, s2, s4, s6), WORDS(s1, s3, s5, s7))                                             \
  LANES(a, 3, 0, 1, 2) LANES(d, 2, 3, 0, 1) LANES(c, 1, 2, 3, 0) /* diagonals, b in place */    \
  MIX(WORDS(s14, s8, s10, s12), WORDS(s15, s9, s11, s13))                                       \
  LANES(a, 1, 2, 3, 0) LANES(d, 2, 3, 0, 1) LANES(c, 3, 0, 1, 2)

static void compress(uint64_t h[8], const uint64_t m[16], uint64_t num_bytes, int is_last) {
  Row a, b, c, a0, b0;
  memcpy(&a0, h, sizeof a0);
  memcpy(&b0, h + 4, sizeof b0);
  memcpy(&c, IV, sizeof c);
  Row d = {IV[4] ^ num_bytes, IV[5], is_last ? ~IV[6] : IV[6], IV[7]};
  a = a0, b = b0;
  ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
  ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
  ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4)
  ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8)
  ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13)
  ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9)
  ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11)
  ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10)
  ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5)
  ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0)
  ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
  ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
  a ^= a0 ^ c, b ^= b0 ^ d;
  memcpy(h, &a, sizeof a);
  memcpy(h + 4, &b, sizeof b);
}

// Hash num_blocks blocks of block_bytes each, parents first, into `hashes`.
void baton_chain_hashes(const uint8_t *parent, const uint8_t *blocks, uint64_t block_bytes,
                        uint64_t num_blocks, uint8_t *hashes) {
  for (uint64_t number = 0; number < num_blocks; number++) {
    uint64_t h[8];
    memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000 ^ HASH_BYTES;  // no key, one leaf
    const uint8_t *block = blocks + number * block_bytes;
    uint64_t begin = HASH_BYTES, left = block_bytes, num_hashed = 0;
    do {
      uint64_t m[CHUNK_BYTES / 8] = {0};
      if (begin) memcpy(m, parent, HASH_BYTES);
      uint64_t taken = left < CHUNK_BYTES - begin ? left : CHUNK_BYTES - begin;
      memcpy((uint8_t *)m + begin, block, taken);
      block += taken, left -= taken, num_hashed += begin + taken, begin = 0;
      compress(h, m, num_hashed, left == 0);
    } while (left);
    memcpy(hashes + number * HASH_BYTES, h, HASH_BYTES);
    parent = hashes + number * HASH_BYTES;
  }
}
