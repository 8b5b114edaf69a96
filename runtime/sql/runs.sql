-- Runs, events, model calls and connector states, by name.

-- name: insert_run
-- One row per idempotency key: a second insert with the same key inserts nothing.
INSERT INTO runtime.runs
    (tenant_id, id, kind, domain, domain_digest, task, policy, sampling, priority,
     idempotency_key, request_hash)
VALUES
    (%(tenant_id)s, %(id)s, %(kind)s, %(domain)s, %(domain_digest)s, %(task)s, %(policy)s,
     %(sampling)s, %(priority)s, %(idempotency_key)s, %(request_hash)s)
ON CONFLICT (tenant_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
RETURNING id;

-- name: insert_private
INSERT INTO runtime.run_private (tenant_id, run_id, expectation)
VALUES (%(tenant_id)s, %(run_id)s, %(expectation)s);

-- name: insert_file
INSERT INTO runtime.run_files (tenant_id, run_id, path, content)
VALUES (%(tenant_id)s, %(run_id)s, %(path)s, %(content)s);

-- name: find_by_idempotency_key
SELECT id, request_hash FROM runtime.runs
WHERE tenant_id = %(tenant_id)s AND idempotency_key = %(idempotency_key)s;

-- name: get_run
SELECT tenant_id, id, kind, domain, domain_digest, task, policy, sampling, state, reason, answer,
       verdict, failure, usage, initial_snapshot, attempts, cancel_requested,
       created_at, started_at, finished_at
FROM runtime.runs
WHERE tenant_id = %(tenant_id)s AND id = %(id)s;

-- name: list_runs
-- Newest first; the cursor is the (created_at, id) of the last row seen.
SELECT tenant_id, id, kind, domain, domain_digest, task, policy, sampling, state, reason, answer,
       verdict, failure, usage, initial_snapshot, attempts, cancel_requested,
       created_at, started_at, finished_at
FROM runtime.runs
WHERE tenant_id = %(tenant_id)s
  AND (%(domain)s::text IS NULL OR domain = %(domain)s)
  AND (%(state)s::text IS NULL OR state = %(state)s)
  AND (%(kind)s::text IS NULL OR kind = %(kind)s)
  AND (%(before_at)s::timestamptz IS NULL OR (created_at, id) < (%(before_at)s, %(before_id)s))
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s;

-- name: get_private
SELECT expectation FROM runtime.run_private
WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s;

-- name: get_files
SELECT path, content FROM runtime.run_files
WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s ORDER BY path;

-- name: claim_runs
-- The most urgent queued runs nobody else is claiming; the fence rises with every claim. Held kinds
-- are read once and filter the walk along the index: they stay queued until their hold is over.
WITH claimable AS (
    SELECT tenant_id, id FROM runtime.runs
    WHERE state = 'queued'
      AND kind <> ALL (ARRAY(SELECT unnest(kinds) FROM runtime.holds WHERE until > now()))
    ORDER BY priority, created_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE runtime.runs AS run
SET state = 'running', lease_owner = %(owner)s, attempts = attempts + 1, fence = fence + 1,
    lease_until = now() + make_interval(secs => %(lease_seconds)s),
    started_at = coalesce(started_at, now())
FROM claimable
WHERE run.tenant_id = claimable.tenant_id AND run.id = claimable.id
RETURNING run.tenant_id, run.id, run.fence, run.attempts;

-- name: heartbeat
UPDATE runtime.runs
SET lease_until = now() + make_interval(secs => %(lease_seconds)s)
WHERE state = 'running' AND lease_owner = %(owner)s
RETURNING id, fence, cancel_requested;

-- name: release_run
-- A runner that drains gives its run back without using up an attempt.
UPDATE runtime.runs
SET state = 'queued', lease_owner = NULL, lease_until = NULL, attempts = attempts - 1
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'running'
RETURNING id;

-- name: expired_runs
SELECT tenant_id, id, attempts FROM runtime.runs
WHERE state = 'running' AND lease_until < now()
ORDER BY lease_until
LIMIT %(limit)s
FOR UPDATE SKIP LOCKED;

-- name: requeue_expired
-- The fence rises, so that the silent holder can write no more.
UPDATE runtime.runs
SET state = 'queued', lease_owner = NULL, lease_until = NULL, fence = fence + 1
WHERE tenant_id = %(tenant_id)s AND id = %(id)s
RETURNING id;

-- name: next_seq_fenced
-- Reserve `count` sequence numbers for the holder of the lease; no row means the lease is lost.
UPDATE runtime.runs SET last_seq = last_seq + %(count)s
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'running'
RETURNING last_seq;

-- name: next_seq
UPDATE runtime.runs SET last_seq = last_seq + 1
WHERE tenant_id = %(tenant_id)s AND id = %(id)s
RETURNING last_seq, state;

-- name: insert_event
INSERT INTO runtime.events (tenant_id, run_id, seq, body)
VALUES (%(tenant_id)s, %(run_id)s, %(seq)s, %(body)s);

-- name: list_events
SELECT run_id, seq, at, body FROM runtime.events
WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s AND seq > %(after)s
ORDER BY seq
LIMIT %(limit)s;

-- name: insert_model_call
INSERT INTO runtime.model_calls
    (tenant_id, run_id, turn, parent_turn, prompt_length, prompt_hash, prompt_delta, sampled,
     logprobs, finish_reason, temperature, policy_id, template_digest, cached_tokens, trainable,
     seconds)
VALUES
    (%(tenant_id)s, %(run_id)s, %(turn)s, %(parent_turn)s, %(prompt_length)s, %(prompt_hash)s,
     %(prompt_delta)s::int4[], %(sampled)s::int4[], %(logprobs)s::float4[], %(finish_reason)s,
     %(temperature)s, %(policy_id)s, %(template_digest)s, %(cached_tokens)s, %(trainable)s,
     %(seconds)s);

-- name: list_model_calls
SELECT turn, parent_turn, prompt_length, prompt_hash, prompt_delta, sampled, logprobs,
       finish_reason, temperature, policy_id, template_digest, cached_tokens, trainable, seconds
FROM runtime.model_calls
WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s
ORDER BY turn;

-- name: save_connector_state
INSERT INTO runtime.connector_states (tenant_id, run_id, connector, state)
VALUES (%(tenant_id)s, %(run_id)s, %(connector)s, %(state)s)
ON CONFLICT (tenant_id, run_id, connector) DO UPDATE SET state = excluded.state;

-- name: list_connector_states
SELECT connector, state FROM runtime.connector_states
WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s;

-- name: set_initial_snapshot
UPDATE runtime.runs SET initial_snapshot = coalesce(initial_snapshot, %(snapshot)s)
WHERE tenant_id = %(tenant_id)s AND id = %(id)s;

-- name: finish_run
UPDATE runtime.runs
SET state = %(state)s, reason = %(reason)s, answer = %(answer)s, verdict = %(verdict)s,
    failure = %(failure)s, usage = %(usage)s, finished_at = now(), lease_owner = NULL,
    lease_until = NULL
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'running'
RETURNING id;

-- name: end_unleased
-- Cancel a queued run, or bury one that used up its attempts.
UPDATE runtime.runs
SET state = %(state)s, reason = %(reason)s, failure = %(failure)s, finished_at = now(),
    lease_owner = NULL, lease_until = NULL, fence = fence + 1
WHERE tenant_id = %(tenant_id)s AND id = %(id)s
  AND state = %(from_state)s
RETURNING id;

-- name: request_cancel
UPDATE runtime.runs SET cancel_requested = true
WHERE tenant_id = %(tenant_id)s AND id = %(id)s
RETURNING state;

-- name: count_by_state
SELECT state, count(*) AS runs FROM runtime.runs GROUP BY state;

-- name: get_alias
SELECT policy FROM runtime.aliases
WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND alias = %(alias)s;

-- name: find_policy
-- A registered policy by its id.
SELECT policy FROM runtime.policies
WHERE tenant_id = %(tenant_id)s AND id = %(policy_id)s;

-- name: find_aliased_policy
-- A policy by its id, from whichever alias of the tenant serves it.
SELECT policy FROM runtime.aliases
WHERE tenant_id = %(tenant_id)s AND policy ->> 'id' = %(policy_id)s
LIMIT 1;

-- name: run_progress
-- What a follower of the events asks every second: is there more, and will there be?
SELECT state, last_seq,
       EXISTS (SELECT 1 FROM runtime.run_private AS private
               WHERE private.tenant_id = run.tenant_id AND private.run_id = run.id) AS has_gold
FROM runtime.runs AS run
WHERE tenant_id = %(tenant_id)s AND id = %(id)s;
