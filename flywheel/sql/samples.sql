-- Which run answers which request of a cycle. The last try of a member is the one nobody replaced.

-- name: link
INSERT INTO flywheel.samples
    (tenant_id, cycle_id, stage_seq, arm, task_id, member, replaces, run_id)
VALUES
    (%(tenant_id)s, %(cycle_id)s, %(stage_seq)s, %(arm)s, %(task_id)s, %(member)s, %(replaces)s,
     %(run_id)s)
ON CONFLICT DO NOTHING;

-- name: last_tries
SELECT sample.arm, sample.task_id, sample.member, run.id AS run_id, run.policy_id, run.state,
       run.verdict ->> 'status' AS verdict, (run.verdict ->> 'reward')::float8 AS reward, run.usage
FROM flywheel.samples AS sample
JOIN runtime.runs_v1 AS run ON run.tenant_id = sample.tenant_id AND run.id = sample.run_id
WHERE sample.tenant_id = %(tenant_id)s AND sample.cycle_id = %(cycle_id)s
  AND sample.stage_seq = %(stage_seq)s
  AND NOT EXISTS (
      SELECT 1 FROM flywheel.samples AS later
      WHERE later.tenant_id = sample.tenant_id AND later.cycle_id = sample.cycle_id
        AND later.stage_seq = sample.stage_seq AND later.arm = sample.arm
        AND later.task_id = sample.task_id AND later.member = sample.member
        AND later.replaces = sample.run_id)
ORDER BY sample.arm, sample.task_id, sample.member;

-- name: tries
-- How often each member was requested.
SELECT arm, task_id, member, count(*) AS tries FROM flywheel.samples
WHERE tenant_id = %(tenant_id)s AND cycle_id = %(cycle_id)s AND stage_seq = %(stage_seq)s
GROUP BY arm, task_id, member;

-- name: run_as_requested
SELECT kind, task, policy, sampling, expectation FROM runtime.runs_v1
WHERE tenant_id = %(tenant_id)s AND id = %(run_id)s;

-- name: run_files
SELECT path, content FROM runtime.run_files_v1
WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s;

-- name: open_runs
SELECT run.id AS run_id
FROM flywheel.samples AS sample
JOIN runtime.runs_v1 AS run ON run.tenant_id = sample.tenant_id AND run.id = sample.run_id
WHERE sample.tenant_id = %(tenant_id)s AND sample.cycle_id = %(cycle_id)s
  AND run.state IN ('queued', 'running', 'waiting_approval', 'waiting_input')
ORDER BY run.id;

-- name: model_calls
SELECT run_id, turn, parent_turn, prompt_length, prompt_hash, prompt_delta, sampled, logprobs,
       finish_reason, temperature, policy_id, template_digest, cached_tokens, trainable, seconds
FROM runtime.model_calls_v1
WHERE tenant_id = %(tenant_id)s AND run_id = ANY(%(run_ids)s)
ORDER BY run_id, turn;
