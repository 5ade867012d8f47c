  // Merge a query head's splits into its attention output. There is one threadgroup per query head.
  //
  // Inputs:
  //   partial, top, total  outputs of `attend`
  //   sinks                (n_heads), logits of attention sinks, very negative for models without sinks. A sink takes a
  //                        share of the softmax but has no value.
  // Output:
  //   output  (n_heads, D), in the model's dtype T
  constexpr uint COLUMNS = D / 4, PARTS = THREADS / COLUMNS;  // threads that share a row; rows read at once
  threadgroup float part_sum[PARTS * D], part_mass[PARTS];
  const uint tid = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.x, n_splits = params[9];
  const uint part = tid / COLUMNS, column = 4 * (tid % COLUMNS);
  const float sink = float(sinks[head]);

  // Every SIMD group computes the maximum itself, which is cheaper than a barrier.
  float maximum = sink;
  for (uint s = lane; s < n_splits; s += 32) maximum = max(maximum, top[head * n_splits + s]);
  maximum = simd_max(maximum);

  if (part < PARTS) {
    float sum[4] = {0, 0, 0, 0}, mass = 0;
    for (uint s = part; s < n_splits; s += PARTS) {
      const uint row = head * n_splits + s;
      const float share = exp(top[row] - maximum);
      mass += share * total[row];
      UNROLL for (uint j = 0; j < 4; j++) sum[j] += share * partial[row * D + column + j];
    }
    UNROLL for (uint j = 0; j < 4; j++) part_sum[part * D + column + j] = sum[j];
    if (column == 0) part_mass[part] = mass;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint d = tid; d < D; d += THREADS) {
    float sum = 0, mass = exp(sink - maximum);
    for (uint p = 0; p < PARTS; p++) { sum += part_sum[p * D + d]; mass += part_mass[p]; }
    output[head * D + d] = T(sum / mass);
  }
