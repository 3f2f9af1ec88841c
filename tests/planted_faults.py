"""Plausible mistakes in the package, each with the tests of ``make test`` that must find it.

The faults are of different kinds, so that a shorter or faster suite that finds all of them still
checks every part. A fault is a piece of text that occurs once in a file, and what replaces it.
``test_planted_faults.py`` plants each one in a copy of the package.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A mistake to plant in a copy of the package, and the tests that find it within seconds."""

    name: str  # what goes wrong
    file: str  # path below ``src/pronk``
    right: str  # text of the file, with its indentation; occurs once
    wrong: str
    tests: str  # files or node ids below ``tests``, with spaces between them


_SAMPLING = (
    Fault(
        "one token too many is accepted",
        "sampling/verify.py",
        "child = tree.child(node, token)\n",
        "child = tree.child(node, token) or next(iter(tree.children(node).values()), None)\n",
        "sampling/test_verify.py",
    ),
    Fault(
        "the distribution after a rejection keeps mass that the drafter has proposed",
        "sampling/verify.py",
        "        return np.maximum(w * p - q, 0.0)\n",
        "        return np.abs(w * p - q)\n",
        "sampling/test_sampled_drafts.py",
    ),
    Fault(
        "a trial of the rejection rule is drawn for the wrong draft token",
        "sampling/noise.py",
        "    return (_mix(key - (trial + 1) * _INCREMENT) >> 11) * 2.0**-53\n",
        "    return (_mix(key) >> 11) * 2.0**-53\n",
        "sampling/test_rejection.py",
    ),
    Fault(
        "the second sample of a prompt has the seed of the first",
        "sampling/noise.py",
        "    return seed if sample == 0 else",
        "    return seed if sample <= 1 else",
        "sampling/test_sampler.py test_llm.py",
    ),
    Fault(
        "the context of the bonus token lacks the accepted draft tokens",
        "sampling/acceptance.py",
        "        sampler.advance(token)\n",
        "        if tree.child(node, token) is None:\n            sampler.advance(token)\n",
        "sampling/test_acceptance.py",
    ),
    Fault(
        "logit bias counts after the temperature",
        "sampling/sampler.py",
        "kept, ids = truncate(self._process(logits) / self._stateless.temperature,",
        "kept, ids = truncate(self._process(logits / self._stateless.temperature),",
        "sampling/test_sampler.py",
    ),
    Fault(
        "penalties count all rejected draft tokens but the last",
        "sampling/logits_processors.py",
        "        for token in self.context.tentative[-count:] if count else ():\n",
        "        for token in self.context.tentative[-1:] if count else ():\n",
        "sampling/test_sampler.py",
    ),
    Fault(
        "min_tokens allows the end one token too early",
        "sampling/logits_processors.py",
        "self.context.num_generated < self.min_tokens",
        "self.context.num_generated < self.min_tokens - 1",
        "sampling/test_sampler.py",
    ),
    Fault(
        "top_p drops the token that reaches the sum",
        "sampling/truncation.py",
        "np.count_nonzero(sums - probs < top_p)",
        "np.count_nonzero(sums < top_p)",
        "sampling/test_sampler.py",
    ),
    Fault(
        "the budget of thoughts is not restored after a rejection",
        "sampling/thinking.py",
        "        del self._states[len(self._states) - count :]\n",
        "        del self._states[-1:]\n",
        "engine/test_thinking.py",
    ),
    Fault(
        "a guide continues from a text that was rolled back",
        "sampling/grammar_processor.py",
        "        while self._kept and self._kept[-1][0] > size:\n",
        "        while self._kept and self._kept[-1][0] > size + 1:\n",
        "sampling/test_grammar_processor.py",
    ),
)

_CACHE = (
    Fault(
        "accepted rows are moved from the wrong slots",
        "cache/paged.py",
        "self.move(slots[moved_from], slots[moved_to])",
        "self.move(slots[moved_to], slots[moved_from])",
        "cache/test_paged.py",
    ),
    Fault(
        "the block that a copy replaces is not released",
        "cache/blocks.py",
        "        self.references[old] -= 1\n",
        "",
        "cache/test_blocks.py",
    ),
    Fault(
        "a cached prefix contains the last token",
        "cache/prefix.py",
        "        for number in range((len(tokens) - 1) // size):\n",
        "        for number in range(len(tokens) // size):\n",
        "cache/test_prefix.py",
    ),
    Fault(
        "tenants share cached prefixes",
        "engine/request.py",
        "        return cache_salt(self.adapter, self.salt)\n",
        "        return cache_salt(self.adapter)\n",
        "engine/test_prompt_cache.py",
    ),
    Fault(
        "adapters share cached prefixes",
        "models/adapters.py",
        "    return salt if adapter is None else sha256(adapter.digest + salt).digest()\n",
        "    return salt\n",
        "engine/test_adapters.py",
    ),
    Fault(
        "adapters are not multiplied by the factors of the weights",
        "models/adapters.py",
        "            scaled = taken * np.float32(place.factor)\n",
        "            scaled = taken\n",
        "models/test_adapters.py",
    ),
    Fault(
        "adapters change a file whose weights have unknown factors",
        "models/adapters.py",
        "    if config.has_folded_factors:\n",
        "    if False:\n",
        "models/test_adapters.py",
    ),
    Fault(
        "the size of heads is taken from the hidden size although the family computes it",
        "models/config_reader.py",
        '    is_given = keys.get("head_dim") is not None or "head_dim" in features\n',
        '    is_given = keys.get("head_dim") is not None\n',
        "models/families/test_deepseek.py",
    ),
    Fault(
        "Chinese characters belong to the words of Kimi",
        "text/patterns.py",
        '    rf"[{_HAN}]+"\n',
        '    rf"[{_HAN}]{{0}}"\n',
        "text/test_gguf_tokenizer.py",
    ),
    Fault(
        "the correction of a router also changes the weights of experts",
        "torch/program.py",
        "        weights = taken.sigmoid()\n",
        "        weights = _rank_experts(outputs, mixture, correction).gather(-1, chosen)\n",
        "torch/test_kernels.py",
    ),
    Fault(
        "a router's choice is not limited to the best groups of experts",
        "models/kernel_program.py",
        "        op.groups = mixture.groups\n",
        "        op.groups = 1\n",
        "kernels/test_experts.py",
    ),
    Fault(
        "the number that a family adds to the sum of experts' weights is lost",
        "models/kernel_program.py",
        "        op.eps = mixture.epsilon\n",
        "",
        "kernels/test_experts.py",
    ),
    Fault(
        "all heads of a token have the gate of the first head",
        "models/kernel_program.py",
        "        op.heads = heads\n",
        "        op.heads = 1\n",
        "kernels/test_gates.py",
    ),
    Fault(
        "a layer that is an MLP alone has keys in the cache",
        "checkpoint/config.py",
        '        if self.sublayers_of(layer) == "mlp":\n            return "an MLP alone"\n',
        "",
        "models/test_nemotron.py",
    ),
    Fault(
        "layers without experts of a GGUF file have some",
        "models/gguf_reader.py",
        "            layers=tuple(layer >= num_dense for layer in range(num_layers)),\n",
        "            layers=(True,) * num_layers,\n",
        "models/families/test_glm.py::test_an_mtp_head_of_a_file_is_not_used",
    ),
    Fault(
        "the scaling factor of a router is lost",
        "models/kernel_program.py",
        "        op.scale = mixture.scale\n",
        "",
        "kernels/test_experts.py",
    ),
    Fault(
        "a token leaves the sliding window one step too early",
        "kernels/csrc/attention.inc",
        "> first_held ? row->position - op->window + 1",
        "> first_held ? row->position - op->window + 2",
        "engine/test_windows.py::test_windows_equal_a_dense_reference",
    ),
    Fault(
        "blocks are released although the window still needs them",
        "cache/paged.py",
        "block_table.length - window + 1)\n",
        "block_table.length - window + 16)\n",
        "engine/test_windows.py",
    ),
    Fault(
        "codes of 8 bits are stored with the scales of another head",
        "cache/layout.py",
        "        scales = panels[",
        "        scales = panels[::-1][",
        "cache/test_paged.py",
    ),
)

_STATES = (
    Fault(
        "a replayed token only lets the state decay",
        "kernels/csrc/recurrence.inc",
        "vstore(to + n * 16, vfma(key, d[n], vmul(vload(from + n * 16), decay)));\n",
        "vstore(to + n * 16, vmul(vload(from + n * 16), decay));\n",
        "models/test_recurrence.py::test_random_scripts",
    ),
    Fault(
        "a node goes on from the state of the node before it instead of its parent's",
        "kernels/csrc/forward.cpp",
        "int32_t from = parent < first ? base : level[parent];",
        "int32_t from = parent < first ? base : level[node - 1];",
        "models/test_recurrence.py::test_random_scripts",
    ),
    Fault(
        "a state decays after its update",
        "kernels/csrc/recurrence.inc",
        "row = vfma(vset(update_k[i]), d[n], vmul(row, update_decay));\n",
        "row = vmul(vfma(vset(update_k[i]), d[n], row), update_decay);\n",
        "models/test_recurrence.py::test_formulas",
    ),
    Fault(
        "a node's convolution misses the last inputs before the tree",
        "kernels/csrc/recurrence.inc",
        ": window.at(--before);\n",
        ": window.at(i);\n",
        "models/test_recurrence.py::test_random_scripts",
    ),
    Fault(
        "a checkpoint has the digest of the block before",
        "cache/states.py",
        "self.checkpoints.add(block_table.digests[number - 1], slot)",
        "self.checkpoints.add(block_table.digests[number - 2], slot)",
        "cache/test_checkpoints.py",
    ),
    Fault(
        "a prompt goes on from a checkpoint of another length",
        "cache/checkpoints.py",
        "                return number, slot\n",
        "                return len(digests), slot\n",
        "engine/test_states.py::test_prefix_hits_at_each_place",
    ),
    Fault(
        "a pass through the first layers changes their states",
        "models/layer_executor.py",
        "        program.keeps_states = num_layers == len(decoder.layers)\n",
        "",
        "models/test_state_traffic.py",
    ),
    Fault(
        "a pass of a drafter moves the state to the accepted tokens",
        "cache/states.py",
        "        keeps = num_final >= committed\n",
        "        keeps = True\n",
        "cache/test_state_pool.py",
    ),
    Fault(
        "the main chain of draft tokens enters the state",
        "cache/states.py",
        "max(0, min(num_final - committed, longest) - absorbed)",
        "max(0, longest - absorbed)",
        "engine/test_states.py::test_preemption_at_random_steps",
    ),
    Fault(
        "requests are preempted after accepted draft tokens",
        "cache/states.py",
        "        self._drop_taken_over(table)\n        committed = block_table.length\n"
        "        for index",
        "        committed = block_table.length\n        for index",
        "engine/test_states.py::test_drafters",
    ),
    Fault(
        "a state keeps a token that was rolled back",
        "cache/states.py",
        "        if table.length > length:\n",
        "        if table.length > length + 1:\n",
        "cache/test_state_pool.py",
    ),
    Fault(
        "a text goes on from disk with the state of the block before",
        "cache/prompt_cache.py",
        "self.store.read(self._state_keys(digests[stop - 1 : stop]))",
        "self.store.read(self._state_keys(digests[stop - 2 : stop - 1]))",
        "engine/test_disk_states.py",
    ),
    Fault(
        "Mamba 2 adds values as they are instead of dt times the values",
        "kernels/csrc/recurrence.inc",
        "    return growth;\n",
        "    return vset(1.0f);\n",
        "models/test_recurrence.py::test_formulas",
    ),
    Fault(
        "the outputs of Mamba 2 lack the values themselves",
        "kernels/csrc/recurrence.inc",
        "    if (Rule::SKIPS) out = vfma(vset(x.skip), value, out);\n",
        "",
        "models/test_recurrence.py::test_formulas",
    ),
    Fault(
        "states of another layout are accepted",
        "kernels/csrc/forward.cpp",
        "if (op->state_size != z.heads * z.state || op->update_size != z.update) return false;",
        "",
        "models/test_recurrence.py::test_other_layouts_are_refused",
    ),
    Fault(
        "the convolution of a recurrence has no bias",
        "models/kernel_program.py",
        "self._set_filter(mix, layer.filter, layer.filter_bias)",
        "self._set_filter(mix, layer.filter, None)",
        "models/test_recurrence.py::test_formulas",
    ),
    Fault(
        "the norm after the gates spans all outputs",
        "models/program.py",
        "self.group_norm(layer.mixer_norm, layer.recurrent.key_heads)",
        "self.group_norm(layer.mixer_norm, 1)",
        "models/test_recurrence.py::test_formulas",
    ),
    Fault(
        "attention beside a recurrence reads the outputs of the recurrence",
        "models/program.py",
        """        self._project_heads(layer, index)
        self._add_branch(layer.mixer_out, "A", None, layer.config, partial=False)
""",
        """        self._add_branch(layer.mixer_out, "A", None, layer.config, partial=False)
        self._project_heads(layer, index)
""",
        "models/test_recurrence.py::test_formulas",
    ),
    Fault(
        "a layer with a recurrence and attention has no room for keys",
        "checkpoint/config.py",
        "recurrent is not None and not recurrent.parallel",
        "recurrent is not None",
        "models/test_recurrence.py::test_room_for_keys",
    ),
    Fault(
        "a tree reads the state again for each branch",
        "kernels/csrc/recurrence.inc",
        "int64_t reads = segment->steps && !is_empty,",
        "int64_t reads = is_empty ? 0 : segment->steps,",
        "models/test_state_traffic.py",
    ),
)

_SCHEDULER = (
    Fault(
        "a tenant waits twice as long for its turn",
        "engine/scheduler.py",
        "self.fair_share.waiting_since(now - self.max_wait)",
        "self.fair_share.waiting_since(now - 2 * self.max_wait)",
        "engine/test_turns.py",
    ),
    Fault(
        "the request that started first is preempted",
        "engine/scheduler.py",
        "            reversed(victims),\n",
        "            victims,\n",
        "engine/test_scheduler.py",
    ),
    Fault(
        "a pass computes more prompt tokens than a chunk",
        "engine/scheduler.py",
        "                    left -= shares[request]\n",
        "",
        "engine/test_turns.py",
    ),
    Fault(
        "generated tokens are not charged while a request runs",
        "engine/scheduler.py",
        "        for request in self.running:\n            self._charge_tenant(request)\n",
        "",
        "engine/test_scheduler.py",
    ),
    Fault(
        "blocks of a removed request stay allocated",
        "engine/scheduler.py",
        "        self.cache.release(request.block_table)\n        self._charge_tenant(request)\n",
        "        self._charge_tenant(request)\n",
        "engine/test_scheduler.py",
    ),
    Fault(
        "waiting requests have no deadline",
        "engine/scheduler.py",
        "        for request in (*self.running, *self.waiting):\n            if request.deadline",
        "        for request in self.running:\n            if request.deadline",
        "engine/test_scheduler.py",
    ),
    Fault(
        "samples of a prompt share it without its adapter",
        "engine/scheduler.py",
        "-1 if request.adapter is None else",
        "-1 if request.adapter is None or request.parent else",
        "engine/test_adapters.py",
    ),
    Fault(
        "a resumed request counts each earlier token twice",
        "engine/request.py",
        "            self.sampler.commit_tokens(1)\n",
        "",
        "test_async_llm.py",
    ),
)

_DRAFTERS = (
    Fault(
        "first_of counts the draft tokens of its parts for itself",
        "drafting/combined/merged.py",
        "ledger.with_gains(proposer.label, tree)\n",
        "ledger.with_gains(self.label, tree)\n",
        "drafting/shared/test_composite.py",
    ),
    Fault(
        "options that a drafter declares are not checked",
        "drafting/proposer.py",
        '        check_options(self, f"{self.name}: ")\n',
        "",
        "drafting/test_names.py::test_declared_options_of_a_subclass_are_checked",
    ),
    Fault(
        "an option that is declared by a text is not checked",
        "base/options.py",
        '    if isinstance(annotation, str) and "Annotated[" in annotation:\n',
        "    if False:\n",
        "base/test_options.py",
    ),
    Fault(
        "texts of the rejection rule become draft tokens of other requests",
        "drafting/from_text/suffix.py",
        "        state.private = outcome.params.rejects\n",
        "        state.private = False\n",
        "drafting/test_memory.py",
    ),
    Fault(
        "a draft token of EAGLE has the feature of the last node instead of its parent's",
        "drafting/from_target/_eagle_runner.py",
        "[draft.outputs[parent] for parent in draft.parents[computed:]]",
        "[draft.outputs[-1] for parent in draft.parents[computed:]]",
        "drafting/from_target/test_eagle3.py",
    ),
    Fault(
        "tokens that a module skips keep KV slots, whose rows other requests then reuse",
        "drafting/shared/draft_cache.py",
        "        self.pool.release_before(self.block_table, position)\n",
        "",
        "drafting/shared/test_draft_cache.py",
    ),
    Fault(
        "an MTP block reads the hidden state before the embedding",
        "drafting/from_target/modules/eagle.py",
        "        part = 0 if names.embedding_first else 1\n",
        "        part = 1 if names.embedding_first else 0\n",
        "drafting/from_target/test_mtp.py::test_drafts_equal_the_formulas",
    ),
    Fault(
        "the MTP block of a mixture has the MLP of a dense model",
        "checkpoint/config.py",
        "    return replace(kind, layers=(True,) * count)\n",
        "    return None\n",
        "drafting/from_target/test_mtp.py::test_drafts_equal_the_formulas",
    ),
    Fault(
        "alternative names of the MTP block's tensors are those of the model's layers",
        "models/inventory.py",
        "[name for name in canonical if not names.ignored.fullmatch(name)]",
        "[*canonical]",
        "drafting/from_target/test_mtp.py"
        "::test_experts_of_block_and_model_may_be_stored_differently",
    ),
    Fault(
        "a copied row of a packed matrix has the lanes of the row before",
        "kernels/weights.py",
        "        taken = lanes[numbers, :, :, rows % 16]\n",
        "        taken = lanes[numbers, :, :, (rows - 1) % 16]\n",
        "kernels/test_weights.py::test_chosen_outputs",
    ),
    Fault(
        "a trimmed head drafts rows by their number instead of their token",
        "drafting/from_target/modules/eagle.py",
        "        self.draft_ids = self.tokens[rows]\n",
        "        self.draft_ids = np.arange(len(rows), dtype=np.int32)\n",
        "drafting/from_target/test_mtp.py::test_rows_of_a_trimmed_head_are_those_of_the_target",
    ),
    Fault(
        "draft tokens are rotated by their number instead of their depth",
        "models/forward_batch.py",
        "np.asarray(entry.tree.depths[entry.num_computed :], np.int64)",
        "np.arange(entry.num_computed, len(entry.tree))",
        "engine/test_bit_equality.py::test_token_trees",
    ),
    Fault(
        "the weights of a path are those of the nodes in order",
        "kernels/csrc/attention.inc",
        "tree_scores[p < q->contiguous_end ? p : length + q->tail[p - q->contiguous_end]]",
        "tree_scores[p]",
        "engine/test_bit_equality.py::test_token_trees",
    ),
    Fault(
        "a node attends to the node before it instead of its parent",
        "sampling/tree.py",
        "            seen[node] = seen[self.parents[node]]\n",
        "            seen[node] = seen[node - 1]\n",
        "sampling/test_tree.py",
    ),
    Fault(
        "the counts of earlier runs are ignored",
        "drafting/acceptance_file.py",
        "        return cls(_read(path, fingerprint), path, fingerprint)\n",
        "        return cls(AcceptanceStats(), path, fingerprint)\n",
        "drafting/test_acceptance_file.py",
    ),
    Fault(
        "verify takes other texts of equal tokens for equal",
        "lab/verification/equality.py",
        "        if plain.text != other.text:\n",
        "        if plain.text is None:\n",
        "lab/verification/test_defects.py",
    ),
)

_FILES = (
    Fault(
        "the high bits of a scale of Q4_K are misread",
        "kernels/csrc/pack.cpp",
        "(uint8_t)((s[i + 8] & 15) | (s[i] >> 6) << 4)",
        "(uint8_t)((s[i + 8] & 15) | (s[i] >> 6) << 5)",
        "kernels/test_blocks.py",
    ),
    Fault(
        "the rows of keys stay in the order of the file",
        "models/tensor_plan.py",
        "        rows = (queries, keys, None)\n",
        "        rows = (queries, None, None)\n",
        "checkpoint/gguf/test_models.py",
    ),
    Fault(
        "the gates of attention are its queries",
        "models/tensor_plan.py",
        "HeadRows(config.num_heads, start=config.head_dim)",
        "HeadRows(config.num_heads, stop=config.head_dim)",
        "models/families/test_qwen3_5.py",
    ),
    Fault(
        "1 is added to the weights of the norm of a recurrence",
        "models/tensor_plan.py",
        "return replace(plan_norm(config, target, stored, recurrent.value_dim), offset=0.0)\n",
        "return plan_norm(config, target, stored, recurrent.value_dim)\n",
        "models/families/test_qwen3_5.py",
    ),
    Fault(
        "queries and keys of Mamba 2 are exchanged",
        "models/tensor_plan.py",
        "    inputs = (queries, keys, values, gates)\n",
        "    inputs = (keys, queries, values, gates)\n",
        "models/test_mamba.py::test_prompts_equal_transformers",
    ),
    Fault(
        "the multipliers of weights are left out",
        "models/tensor_plan.py",
        "replace(tensor, factor=factor) for tensor, factor in pairs",
        "tensor for tensor, factor in pairs",
        "models/test_mamba.py::test_prompts_equal_transformers",
    ),
    Fault(
        "a hybrid Granite rotates queries and keys",
        "models/families/granite_hybrid.py",
        'ropes = () if position == "rope" else (None,) * num_layers',
        "ropes = ()",
        "models/test_mamba.py::test_prompts_equal_transformers",
    ),
    Fault(
        "value heads of a GGUF file use the key heads of a folder",
        "models/families/qwen3_5.py",
        "replace(recurrent, tiled_heads=True)",
        "replace(recurrent, tiled_heads=False)",
        "models/families/test_qwen3_5.py",
    ),
    Fault(
        "tokens that the user has defined are not matched before the text is split",
        "text/gguf_tokenizer.py",
        "        if token is not None and kind in ADDED_KINDS\n",
        "        if token is not None and kind in ADDED_KINDS and ADDED_KINDS[TokenKind(kind)]\n",
        "text/test_gguf_tokenizer.py",
    ),
    Fault(
        "packed weights of an older file of the same name are used",
        "kernels/weight_cache.py",
        'header["source"] != self._source:',
        'header["source"]["version"] != VERSION:',
        "kernels/test_weight_cache.py",
    ),
    Fault(
        "a file is copied to its place instead of renamed",
        "base/files/atomic.py",
        "        partial.replace(path)\n",
        "        shutil.copyfile(partial, path)\n",
        "base/files/test_atomic.py",
    ),
    Fault(
        "latent attention rotates the values i and i + size / 2 of a file that has pairs",
        "models/tensor_plan.py",
        "    pairs = names.permuted_heads\n",
        "    pairs = False\n",
        "models/families/test_deepseek.py",
    ),
    Fault(
        "scores of latent attention lack the size of the rotated part",
        "models/families/deepseek.py",
        "    scale = latent.query_dim**-0.5\n",
        "    scale = latent.plain_dim**-0.5\n",
        "models/families/test_deepseek.py",
    ),
    Fault(
        "a norm of a latent has the epsilon of the other norms",
        "models/placer.py",
        "        return norm if part.eps is None else replace(norm, eps=part.eps)\n",
        "        return norm\n",
        "models/families/test_deepseek.py",
    ),
    Fault(
        "queries take their rotated parts from the plain ones",
        "models/kernel_program.py",
        "        op.first_column = config.num_heads * sizes.plain_dim\n",
        "        op.first_column = 0\n",
        "kernels/test_latent_attention.py",
    ),
    Fault(
        "latents are stored without their norm",
        "kernels/csrc/latent.inc",
        "      norm_row(op->norm, op->eps, op->norm_weight, op->norm_bias, y, y, latent);\n",
        "",
        "kernels/test_latent_attention.py",
    ),
    Fault(
        "all heads multiply the input of the first",
        "kernels/csrc/ops.inc",
        "r * stride + head * K, K, t.row",
        "r * stride, K, t.row",
        "kernels/test_latent_attention.py",
    ),
    Fault(
        "keys of latent attention lack the part that is no value",
        "kernels/csrc/attention.inc",
        "score_rows<Q>(row, q, (int)kv.d, scores + n * 16)",
        "score_rows<Q>(row, q, (int)kv.value_dim, scores + n * 16)",
        "kernels/test_latent_attention.py",
    ),
    Fault(
        "adjacent rows share the adapter of the first",
        "kernels/csrc/adapters.inc",
        "r < first + TILE_M && s->row[r].adapter == s->row[first].adapter",
        "r < first + TILE_M",
        "kernels/test_adapters.py",
    ),
)

_GEMMA4 = (
    Fault(
        "a layer reads the keys of the last but one layer of its kind",
        "models/families/gemma4.py",
        "reads=last[window])\n",
        "reads=last[window] - 2)\n",
        "models/families/test_gemma4.py::test_200_greedy_tokens_equal_transformers",
    ),
    Fault(
        "all rows of a pass have the layer embeddings of its first token",
        "kernels/csrc/ops.inc",
        "load_table_row(op, p->tokens[r], width, embedded);",
        "load_table_row(op, p->tokens[0], width, embedded);",
        "models/families/test_gemma4.py::test_gguf_files_of_full_precision",
    ),
    Fault(
        "layers with a window have the rotations of full attention",
        "models/families/gemma4.py",
        'keys.number("rope.freq_base_swa", 10000.0, bound=1)',
        'keys.number("rope.freq_base", 10000.0, bound=1)',
        "models/families/test_gemma4.py::test_gguf_files_of_full_precision",
    ),
    Fault(
        "the factor of a layer's output is left out",
        "models/decoder.py",
        "            program.norm(None, scale=float(self.scalar[0]))\n",
        "            pass\n",
        "models/families/test_gemma4.py::test_gguf_files_of_full_precision",
    ),
    Fault(
        "values have no norm",
        "models/decoder.py",
        "        if config.value_norm:\n",
        "        if config.value_norm and config.is_plain:\n",
        "models/families/test_gemma4.py::test_gguf_files_of_full_precision",
    ),
    Fault(
        "factors of experts are left out",
        "models/kernel_program.py",
        "op.expert_scale = self._keep_alive(expert_scale)",
        "op.expert_scale = self._keep_alive(None)",
        "models/families/test_gemma4.py::test_gguf_files_of_full_precision",
    ),
    Fault(
        "layers that read the keys of others count as memory of the cache",
        "cache/layout.py",
        "filter(config.stores_keys, range(config.num_layers))",
        "filter(config.has_attention, range(config.num_layers))",
        "models/families/test_gemma4.py::test_pools_have_the_shapes_of_their_layers",
    ),
    Fault(
        "rows of a prompt end early although a drafter reads outputs of later layers",
        "models/layer_executor.py",
        "            and max((*collect, *saved), default=0) <= last\n",
        "",
        "models/test_layer_executor.py",
    ),
    Fault(
        "moved rows have the size of the heads of the first layer",
        "cache/paged.py",
        "                    shape = config.shape_of(layer)\n                    kinds",
        "                    shape = config.shape_of(0)\n                    kinds",
        "engine/test_equality.py::test_other_models",
    ),
)

_TEXTS = (
    Fault(
        "strings may escape letters where names are not excluded by expressions",
        "text/json_schema/translation.py",
        "            has_control_escapes=self._names_by_pattern,\n",
        "            has_control_escapes=not self.intersects_open_names,\n",
        "text/json_schema/test_relax.py::test_names_stay_exact_without_a_control_character",
    ),
    Fault(
        "a stop string that spans tokens is printed in part",
        "text/stream.py",
        "            cut = len(self._held) - withheld\n",
        "            cut = len(self._held)\n",
        "text/test_detokenizer.py",
    ),
    Fault(
        "the first bytes of a character are printed as replacement characters",
        "text/stream.py",
        "        final = text.rstrip(_REPLACEMENT)\n",
        "        final = text\n",
        "text/test_detokenizer.py",
    ),
    Fault(
        "names of special tokens in untrusted messages become these tokens",
        "text/tokenizer.py",
        "plain_ids(part, encode, self.special_ids) if hidden else encode(part)",
        "encode(part)",
        "text/chat/test_untrusted.py",
    ),
    Fault(
        "two texts that a template joins form a special token",
        "text/chat/messages.py",
        "for length in range(1, longest + 1)):\n",
        "for length in range(1, longest)):\n",
        "text/chat/test_untrusted.py",
    ),
)

_SERVER = (
    Fault(
        "values within lists have no limit of levels",
        "server/bodies.py",
        "isinstance(other, (dict, list))]\n",
        "isinstance(other, dict)]\n",
        "server/test_body_reader.py",
    ),
    Fault(
        "an answer that was cut within its call is refused in the next request",
        "server/protocol/tools.py",
        '    return text.encode("utf-16", "surrogatepass")',
        '    return None and text.encode("utf-16", "surrogatepass")',
        "server/test_own_output.py::test_cut_answers_are_accepted_again",
    ),
    Fault(
        "only the beginnings of API keys are compared",
        "server/guard.py",
        "    return hashlib.sha256(key.encode()).digest()\n",
        "    return hashlib.sha256(key[:4].encode()).digest()\n",
        "server/test_limits.py",
    ),
    Fault(
        "a body without a length has no limit",
        "server/guard.py",
        "                    if size > limit:\n",
        '                    if size > limit and length != b"0":\n',
        "server/test_limits.py",
    ),
    Fault(
        "the messages of a body are freed in one call",
        "server/protocol/request.py",
        "            info.context.append(body)\n",
        "            info.context[:] = [body]\n",
        "server/test_garbage.py::test_bodies_are_freed_in_slices",
    ),
    Fault(
        "the header of ignored fields is missing on streams",
        "server/app.py",
        '    headers = {"Cache-Control": "no-store", **report}\n',
        '    headers = {"Cache-Control": "no-store"}\n',
        "server/test_fields.py",
    ),
    Fault(
        "a batch file lacks the answers to requests that failed",
        "server/batch.py",
        "            answers.write(",
        "            if status == HTTPStatus.OK:\n                answers.write(",
        "server/test_batch.py",
    ),
)

_COMMANDS = (
    Fault(
        "an error of standard error ends the command",
        "cli/streams.py",
        "            _discard(self._stream)\n            return len(text)\n",
        "            raise\n",
        "cli/test_streams.py",
    ),
    Fault(
        "a command whose reader has ended reports no failure",
        "cli/main.py",
        "    if isinstance(error, BrokenPipeError):\n        return 1\n",
        "    if isinstance(error, BrokenPipeError):\n        return 0\n",
        "cli/test_streams.py",
    ),
)

# Found by tests with fewer cases, shared references, forked workers or threads in place of
# processes.
_SHORTENED = (
    Fault(
        "a budget of thoughts ends too early after a rejection, with every drafter",
        "sampling/thinking.py",
        "        del self._states[len(self._states) - count :]\n",
        "        del self._states[-1:]\n",
        "engine/test_equality.py::test_options_beside_each_other",
    ),
    Fault(
        "more than three threads change a logit",
        "kernels/library.py",
        "        _check_status(self.library.pronk_run(ops, count, ctypes.byref(call)), call)\n",
        "        _check_status(self.library.pronk_run(ops, count, ctypes.byref(call)), call)\n"
        "        if call.threads > 3 and call.logits:\n"
        "            ctypes.cast(call.logits, ctypes.POINTER(ctypes.c_int32))[0] ^= 1\n",
        "kernels/test_products.py::test_a_row_does_not_depend_on_the_batch",
    ),
    Fault(
        "workers keep KV rows that the driver has replaced",
        "parallel/mirrored_cache.py",
        "            remote_pool.valid[slots] = False\n",
        "            pass\n",
        "parallel/test_runner.py",
    ),
    Fault(
        "worker processes stay when their model is closed",
        "parallel/processes.py",
        "            runner.drop_workers()\n        self.processes.end()\n",
        "            pass\n",
        "parallel/test_trees.py::test_workers_end_with_their_model_and_with_close",
    ),
    Fault(
        "branches of a model are added with a slightly wrong scale",
        "models/program.py",
        "        scale = config.residual_scale\n",
        "        scale = 1.01 * config.residual_scale\n",
        "models/test_logits.py::test_120_greedy_tokens_equal_transformers",
    ),
    Fault(
        "a grammar of one call allows several",
        "text/chat/answer_grammar.py",
        "        if allow_multiple and dialect.repeats_markers:",
        "        if dialect.repeats_markers:",
        "text/chat/test_tools.py::test_texts_of_the_grammar_are_parsed_as_calls_of_the_tools",
    ),
    Fault(
        "the state of a drafter lacks tokens of long steps",
        "drafting/from_text/prompt_lookup.py",
        "        outcome.state.extend(outcome.committed)\n",
        "        outcome.state.extend(outcome.committed[-3:])\n",
        "drafting/test_conformance.py"
        "::test_state_depends_on_the_text_and_the_targets_outputs_alone",
    ),
    Fault(
        "the time of drafters does not count as spent",
        "drafting/ledger.py",
        "        self.ledger.spent += counted\n",
        "",
        "drafting/test_ledger.py::test_the_bound_of_the_loss_holds_in_every_trace",
    ),
    Fault(
        "a short convolution reads the states of the first chain in every branch",
        "kernels/csrc/convolution.inc",
        "  int64_t node = depth < row->contiguous ? depth : s->path[row->tail + depth - "
        "row->contiguous];\n",
        "  int64_t node = depth;\n",
        "engine/test_equality.py::test_other_models",
    ),
    Fault(
        "samples write into the last block of their prompt, which they share",
        "cache/paged.py",
        "            if self.allocator.is_shared(block):\n",
        "            if index > first and self.allocator.is_shared(block):\n",
        "engine/test_memory.py::test_samples_equal_separate_requests",
    ),
    Fault(
        "a damaged file of weights raises an error of another package",
        "checkpoint/tensors.py",
        "    except (SafetensorError, OSError, ValueError, MemoryError) as error:\n",
        "    except (OSError, ValueError, MemoryError) as error:\n",
        "models/test_hostile_files.py::test_files_load_or_are_refused",
    ),
    Fault(
        "the gradients of other processes are not added",
        "train/distributed.py",
        "        dist.all_reduce(all_grads)\n",
        "",
        "train/test_distributed.py::test_processes_agree",
    ),
    Fault(
        "an answer goes on after it has repeated a call",
        "text/chat/answers.py",
        "            if is_repeated or len(self._calls) >= MAX_CALLS:\n",
        "            if len(self._calls) >= MAX_CALLS:\n",
        "server/test_repeated_calls.py::test_generation_ends_with_the_first_repetition",
    ),
    Fault(
        "what a server has exempted from garbage collection stays exempt after its end",
        "server/garbage.py",
        "        gc.unfreeze()\n",
        "        pass\n",
        "server/test_garbage.py::test_python_collects_by_its_own_rule_afterwards",
    ),
)

FAULTS = (
    *_SAMPLING,
    *_CACHE,
    *_STATES,
    *_SCHEDULER,
    *_DRAFTERS,
    *_FILES,
    *_GEMMA4,
    *_TEXTS,
    *_SERVER,
    *_COMMANDS,
    *_SHORTENED,
)
