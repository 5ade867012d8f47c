  // Score entries for the GROUP query heads of a KV head: compute logits from the MXFP4 codes in the index.
  //
  // For each KV head, n_groups threadgroups share the blocks of SCORE_BLOCK entries. Each code is decoded once for all
  // query heads.
  //
  // Inputs:
  //   queries     (n_heads, D), with the query heads of a KV head adjacent
  //   projection  (n_kv_heads, D, K) float32, projects queries to components
  //   codes       (n_kv_heads, capacity, K / 8) uint32, eight codes per word, starting with the lowest bits
  //   powers      (n_kv_heads, capacity, K / 32) uint8, exponents of the powers of two, with a bias of 127
  // Outputs:
  //   block_maxima  (n_heads, n_blocks) float32, largest logit in each block
  //   offsets       (n_heads, n_scored) half, logit minus the block's maximum, at least -65504
  //
  // Infinite and NaN logits are replaced by LOWEST.
  constexpr uint K = (D + 63) / 64 * 32;                 // components: half of D, in whole groups of 32
  constexpr uint WORDS = K / 8, POWERS = K / 32;
  constexpr uint EACH = SCORE_BLOCK / THREADS;           // entries per thread
  constexpr uint PARTS = THREADS / K;                    // threads per component; each sums some of the channels
  constexpr uint SIMD_GROUPS = THREADS / 32;
  constexpr float LOWEST = -3e38f;
  threadgroup float component[GROUP * K], decoded[16], simd_maximum[GROUP * SIMD_GROUPS];
  const uint tid = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
  const uint simd = simdgroup_index_in_threadgroup;
  const uint kv_head = threadgroup_position_in_grid.y, n_groups = params[13];
  const uint n_scored = params[3], capacity = params[11];
  const uint n_blocks = (n_scored + SCORE_BLOCK - 1) / SCORE_BLOCK;
  const float scale = as_type<float>(params[10]);

  // E2M1: one sign bit, two exponent bits, one mantissa bit.
  if (tid < 16) {
    const uint exponent = (tid >> 1) & 3u, mantissa = tid & 1u;
    const float size = exponent == 0 ? 0.5f * float(mantissa)
                                     : (1.0f + 0.5f * float(mantissa)) * float(1u << (exponent - 1));
    decoded[tid] = tid < 8 ? size : -size;
  }
  // Neighbouring threads compute neighbouring components, so that their reads are adjacent. Each element of the
  // projection is read once for all query heads.
  const uint part = tid / K, c = tid % K;
  float sum[GROUP];
  UNROLL for (uint g = 0; g < GROUP; g++) sum[g] = 0;
  if (part < PARTS) {
    for (uint d = part; d < D; d += PARTS) {
      const float weight = projection[(kv_head * D + d) * K + c] * scale;
      UNROLL for (uint g = 0; g < GROUP; g++) sum[g] += float(queries[(kv_head * GROUP + g) * D + d]) * weight;
    }
  }
  for (uint p = 0; p < PARTS; p++) {
    if (part == p) {
      UNROLL for (uint g = 0; g < GROUP; g++) component[g * K + c] = (p == 0 ? 0 : component[g * K + c]) + sum[g];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (uint block = threadgroup_position_in_grid.x; block < n_blocks; block += n_groups) {
    // A thread takes the block's entries tid, tid + THREADS, ..., so that neighbouring threads read neighbouring
    // entries. Past the last entry, it reads the last entry again, which does not affect the maximum.
    float logit[EACH][GROUP];
    uint row[EACH];
    UNROLL for (uint e = 0; e < EACH; e++) {
      row[e] = kv_head * capacity + min(block * SCORE_BLOCK + e * THREADS + tid, n_scored - 1);
      UNROLL for (uint g = 0; g < GROUP; g++) logit[e][g] = 0;
    }
    for (uint p = 0; p < POWERS; p++) {  // 32 components, in four words, share a power
      vec<uint, 4> word[EACH];
      float power[EACH];
      UNROLL for (uint e = 0; e < EACH; e++) {
        word[e] = *(const device vec<uint, 4>*)(codes + row[e] * WORDS + 4 * p);
        // Use the byte as a float's exponent: 0 becomes 0 instead of 2^-127, and 255 becomes infinity.
        power[e] = as_type<float>(uint(powers[row[e] * POWERS + p]) << 23);
      }
      UNROLL for (uint w = 0; w < 4; w++) {
        for (uint c = 0; c < 8; c++) {
          float number[EACH];
          UNROLL for (uint e = 0; e < EACH; e++) number[e] = decoded[(word[e][w] >> (4 * c)) & 15u] * power[e];
          UNROLL for (uint g = 0; g < GROUP; g++) {
            const float q = component[g * K + 32 * p + 8 * w + c];
            UNROLL for (uint e = 0; e < EACH; e++) logit[e][g] += q * number[e];
          }
        }
      }
    }
    // Find the block's maximum for each query head.
    UNROLL for (uint g = 0; g < GROUP; g++) {
      float maximum = LOWEST;
      UNROLL for (uint e = 0; e < EACH; e++) {
        if (!(fabs(logit[e][g]) < -LOWEST)) logit[e][g] = LOWEST;  // infinite, or NaN
        maximum = max(maximum, logit[e][g]);
      }
      maximum = simd_max(maximum);
      if (lane == 0) simd_maximum[g * SIMD_GROUPS + simd] = maximum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (uint g = 0; g < GROUP; g++) {
      const uint head = kv_head * GROUP + g;
      float maximum = LOWEST;
      for (uint s = 0; s < SIMD_GROUPS; s++) maximum = max(maximum, simd_maximum[g * SIMD_GROUPS + s]);
      if (tid == 0) block_maxima[head * n_blocks + block] = maximum;
      UNROLL for (uint e = 0; e < EACH; e++) {
        const uint entry = block * SCORE_BLOCK + e * THREADS + tid;
        if (entry < n_scored) offsets[head * n_scored + entry] = half(max(logit[e][g] - maximum, -65504.0f));
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
