  // Select the n_chosen highest-scoring entries in [first, stop). There is one threadgroup per KV head.
  //
  // Positions are ascending, and ties go to lower positions. For each query head of the group, take an entry's logit
  // minus the head's largest logit in [0, stop). The entry's score is the maximum over the heads, so it is at
  // most 0. Scores are compared in half precision.
  //
  // Inputs:
  //   block_maxima, offsets  outputs of `score`
  //   ids        (n_kv_heads, id_capacity) uint16, cluster id of each entry
  //   choosable  (n_kv_heads, n_means) int32, number of each cluster's entries in [first, stop)
  // Outputs:
  //   positions  (n_kv_heads, n_chosen) uint32
  //   unread     (n_kv_heads, n_means) uint32, `choosable` minus the selected entries; not written without means
  //   ranks      (n_kv_heads, n_scored) uint16, scratch: negated score of each entry, as the bits of a half
  constexpr uint SIMD_GROUPS = THREADS / 32;
  constexpr float LOWEST = -3e38f;
  threadgroup atomic_uint histogram[256], selected[MAX_MEANS];
  threadgroup float largest[GROUP];
  threadgroup uint simd_better[SIMD_GROUPS], simd_equal[SIMD_GROUPS];
  // cut[0]: the bits of the last selected rank that are known so far. cut[1]: number of entries to select among those
  // whose rank has these bits.
  threadgroup uint cut[2];
  const uint tid = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
  const uint simd = simdgroup_index_in_threadgroup, kv_head = threadgroup_position_in_grid.x;
  const uint n_means = params[0], n_chosen = params[1], first = params[2], stop = params[3];
  const uint id_capacity = params[12], n_scored = stop;
  const uint n_blocks = (n_scored + SCORE_BLOCK - 1) / SCORE_BLOCK;

  for (uint g = simd; g < GROUP; g += SIMD_GROUPS) {
    float maximum = LOWEST;
    for (uint b = lane; b < n_blocks; b += 32) {
      maximum = max(maximum, block_maxima[(kv_head * GROUP + g) * n_blocks + b]);
    }
    maximum = simd_max(maximum);
    if (lane == 0) largest[g] = maximum;
  }
  if (tid == 0) { cut[0] = 0; cut[1] = n_chosen; }
  for (uint c = tid; c < n_means; c += THREADS) atomic_store_explicit(&selected[c], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // A rank is an entry's negated score, as the bits of a half. The number is at least 0, so its bits increase with it.
  for (uint i = first + tid; i < stop; i += THREADS) {
    float score = LOWEST;
    for (uint g = 0; g < GROUP; g++) {
      const uint head = kv_head * GROUP + g;
      const float block_offset = block_maxima[head * n_blocks + i / SCORE_BLOCK] - largest[g];
      // Ignore a query head without any finite logit. `max(NaN, x)` is x.
      if (largest[g] > LOWEST) score = max(score, float(offsets[head * n_scored + i]) + block_offset);
    }
    // The mask turns -0 into 0.
    ranks[kv_head * n_scored + i] = as_type<ushort>(half(min(-score, 65504.0f))) & 0x7FFFu;
  }
  // Find the last selected rank with two histograms: first of the upper 8 bits, then of the lower 7 bits.
  for (uint round = 0; round < 2; round++) {
    for (uint i = tid; i < 256; i += THREADS) atomic_store_explicit(&histogram[i], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint upper = cut[0], left = cut[1];
    // Each thread only reads ranks that it has written itself, so no device barrier is needed yet.
    for (uint i = first + tid; i < stop; i += THREADS) {
      const uint rank = ranks[kv_head * n_scored + i];
      if (round == 0) atomic_fetch_add_explicit(&histogram[rank >> 7], 1u, memory_order_relaxed);
      else if (rank >> 7 == upper) atomic_fetch_add_explicit(&histogram[rank & 127u], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd == 0) {  // 8 bins per lane
      uint in_lane = 0;
      for (uint b = 0; b < 8; b++) in_lane += atomic_load_explicit(&histogram[8 * lane + b], memory_order_relaxed);
      uint before = simd_prefix_exclusive_sum(in_lane);
      const bool is_here = before < left && left <= before + in_lane;
      for (uint b = 0; is_here && b < 8; b++) {
        const uint in_bin = atomic_load_explicit(&histogram[8 * lane + b], memory_order_relaxed);
        if (left <= before + in_bin) {
          cut[0] = upper * 128 + 8 * lane + b;
          cut[1] = left - before;
          break;
        }
        before += in_bin;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  // Each SIMD group handles a stretch of entries, and writes its positions after those of the earlier stretches.
  threadgroup_barrier(mem_flags::mem_device);  // from here on, threads read ranks written by others
  const uint last = cut[0], n_equal = cut[1];
  const uint stretch = (stop - first + THREADS - 1) / THREADS * 32;
  const uint from = min(stop, first + simd * stretch), to = min(stop, from + stretch);
  uint better = 0, equal = 0;
  for (uint i = from + lane; i < to; i += 32) {
    const uint rank = ranks[kv_head * n_scored + i];
    better += rank < last ? 1u : 0u;
    equal += rank == last ? 1u : 0u;
  }
  better = simd_sum(better);
  equal = simd_sum(equal);
  if (lane == 0) { simd_better[simd] = better; simd_equal[simd] = equal; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  better = 0;
  equal = 0;
  for (uint s = 0; s < simd; s++) { better += simd_better[s]; equal += simd_equal[s]; }
  for (uint row = from; row < to; row += 32) {  // all lanes take part in every round
    const uint i = row + lane, rank = i < to ? ranks[kv_head * n_scored + i] : 0xFFFFu;
    const uint is_better = rank < last ? 1u : 0u, is_equal = rank == last ? 1u : 0u;
    const uint better_before = better + simd_prefix_exclusive_sum(is_better);
    const uint equal_before = equal + simd_prefix_exclusive_sum(is_equal);
    if (is_better || (is_equal && equal_before < n_equal)) {
      positions[kv_head * n_chosen + better_before + min(equal_before, n_equal)] = i;
      if (n_means > 0) {
        atomic_fetch_add_explicit(&selected[ids[kv_head * id_capacity + i]], 1u, memory_order_relaxed);
      }
    }
    better = simd_shuffle(better_before + is_better, 31);  // the last lane has the total
    equal = simd_shuffle(equal_before + is_equal, 31);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint c = tid; c < n_means; c += THREADS) {
    const uint n = atomic_load_explicit(&selected[c], memory_order_relaxed);
    unread[kv_head * n_means + c] = choosable[kv_head * n_means + c] - n;
  }
