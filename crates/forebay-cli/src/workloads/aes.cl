// AES-256-XTS, a work-item a block of 16 bytes. `tables`: 256 words each of Te0, Td0, the S-box and its inverse.
DEVICE uint swap_bytes(uint w) { return (w >> 24) | ((w >> 8) & 0xff00u) | ((w << 8) & 0xff0000u) | (w << 24); }
DEVICE uint turn(uint w, uint n) { return (w >> n) | (w << (32u - n)); }

// The block's tweak: its sector's, times x to the power of its place in the sector. Words are little-endian here.
DEVICE void tweak_of(GLOBAL const uint *tweaks, uint block, uint *t) {
  uint sector = block / 256u, place = block % 256u;
  for (uint i = 0; i < 4u; i++) t[i] = tweaks[4u * sector + i];
  for (uint i = 0; i < place / 32u; i++) {
    // Times x^32: one word moves up, the one that falls out comes back times x^7 + x^2 + x + 1.
    uint out = t[3];
    t[3] = t[2]; t[2] = t[1];
    t[1] = t[0] ^ (out >> 25) ^ (out >> 30) ^ (out >> 31);
    t[0] = out ^ (out << 1) ^ (out << 2) ^ (out << 7);
  }
  uint n = place % 32u;
  if (n > 0u) {
    uint out = t[3] >> (32u - n);
    t[3] = (t[3] << n) | (t[2] >> (32u - n));
    t[2] = (t[2] << n) | (t[1] >> (32u - n));
    t[1] = (t[1] << n) | (t[0] >> (32u - n));
    t[0] = t[0] << n;
    t[0] ^= out ^ (out << 1) ^ (out << 2) ^ (out << 7);
    // Of `out` fewer than 32 bits are set, so at most seven go beyond the first word.
    t[1] ^= (out >> 25) ^ (out >> 30) ^ (out >> 31);
  }
}

DEVICE void load_block(GLOBAL const uint *data, uint block, const uint *t, GLOBAL const uint *key, uint *s) {
  for (uint i = 0; i < 4u; i++) s[i] = swap_bytes(data[4u * block + i] ^ t[i]) ^ key[i];
}
DEVICE void store_block(GLOBAL uint *data, uint block, const uint *t, const uint *s) {
  for (uint i = 0; i < 4u; i++) data[4u * block + i] = swap_bytes(s[i]) ^ t[i];
}

KERNEL void aes_xts_encrypt(GLOBAL uint *data, GLOBAL const uint *tweaks, GLOBAL const uint *key,
                            GLOBAL const uint *tables, uint blocks) {
  uint block = gid_x();
  if (block >= blocks) return;
  uint t[4], s[4], n[4];
  tweak_of(tweaks, block, t);
  load_block(data, block, t, key, s);
  for (uint round = 1u; round < 14u; round++) {
    for (uint i = 0; i < 4u; i++)
      n[i] = tables[s[i] >> 24] ^ turn(tables[(s[(i + 1u) & 3u] >> 16) & 255u], 8u) ^
             turn(tables[(s[(i + 2u) & 3u] >> 8) & 255u], 16u) ^ turn(tables[s[(i + 3u) & 3u] & 255u], 24u) ^
             key[4u * round + i];
    for (uint i = 0; i < 4u; i++) s[i] = n[i];
  }
  GLOBAL const uint *box = tables + 512;
  for (uint i = 0; i < 4u; i++)
    n[i] = ((box[s[i] >> 24] << 24) | (box[(s[(i + 1u) & 3u] >> 16) & 255u] << 16) |
            (box[(s[(i + 2u) & 3u] >> 8) & 255u] << 8) | box[s[(i + 3u) & 3u] & 255u]) ^ key[56u + i];
  store_block(data, block, t, n);
}

KERNEL void aes_xts_decrypt(GLOBAL uint *data, GLOBAL const uint *tweaks, GLOBAL const uint *key,
                            GLOBAL const uint *tables, uint blocks) {
  uint block = gid_x();
  if (block >= blocks) return;
  uint t[4], s[4], n[4];
  tweak_of(tweaks, block, t);
  load_block(data, block, t, key, s);
  GLOBAL const uint *td = tables + 256;
  for (uint round = 1u; round < 14u; round++) {
    for (uint i = 0; i < 4u; i++)
      n[i] = td[s[i] >> 24] ^ turn(td[(s[(i + 3u) & 3u] >> 16) & 255u], 8u) ^
             turn(td[(s[(i + 2u) & 3u] >> 8) & 255u], 16u) ^ turn(td[s[(i + 1u) & 3u] & 255u], 24u) ^
             key[4u * round + i];
    for (uint i = 0; i < 4u; i++) s[i] = n[i];
  }
  GLOBAL const uint *box = tables + 768;
  for (uint i = 0; i < 4u; i++)
    n[i] = ((box[s[i] >> 24] << 24) | (box[(s[(i + 3u) & 3u] >> 16) & 255u] << 16) |
            (box[(s[(i + 2u) & 3u] >> 8) & 255u] << 8) | box[s[(i + 1u) & 3u] & 255u]) ^ key[56u + i];
  store_block(data, block, t, n);
}
