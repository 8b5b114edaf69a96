-- Cycles and their stages: opening, claiming, advancing, ending.

-- name: insert_cycle
-- Nothing where one is running already, or where this turn of the date exists.
INSERT INTO flywheel.cycles (tenant_id, id, domain, date, turn, trigger, recipe, options)
VALUES (
    %(tenant_id)s, %(id)s, %(domain)s, %(date)s,
    CASE WHEN %(trigger)s = 'nightly' THEN 0 ELSE (
        SELECT coalesce(max(turn), 0) + 1 FROM flywheel.cycles
        WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND date = %(date)s
    ) END,
    %(trigger)s, %(recipe)s, %(options)s
)
ON CONFLICT DO NOTHING
RETURNING id;

-- name: insert_stage
INSERT INTO flywheel.stages (tenant_id, cycle_id, seq, name, round)
VALUES (%(tenant_id)s, %(cycle_id)s, %(seq)s, %(name)s, %(round)s);

-- name: running_cycle
SELECT id FROM flywheel.cycles
WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND state = 'running';

-- name: nightly_cycle
SELECT id FROM flywheel.cycles
WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND date = %(date)s AND turn = 0;

-- name: get_cycle
SELECT tenant_id, id, domain, date, turn, trigger, recipe, options, state, outcome, reason,
       stop_requested, created_at, finished_at
FROM flywheel.cycles
WHERE tenant_id = %(tenant_id)s AND id = %(id)s;

-- name: list_cycles
SELECT tenant_id, id, domain, date, turn, trigger, recipe, options, state, outcome, reason,
       stop_requested, created_at, finished_at
FROM flywheel.cycles
WHERE tenant_id = %(tenant_id)s AND (%(domain)s::text IS NULL OR domain = %(domain)s)
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s;

-- name: list_stages
SELECT cycle_id, seq, name, round, state, attempts, inputs, outputs, metrics, progress, reason,
       started_at, finished_at
FROM flywheel.stages
WHERE tenant_id = %(tenant_id)s AND cycle_id = %(cycle_id)s
ORDER BY seq;

-- name: tenants
SELECT tenant.tenant_id FROM runtime.tenants_v1 AS tenant
WHERE EXISTS (
    SELECT 1 FROM runtime.runs_v1 AS run
    WHERE run.tenant_id = tenant.tenant_id AND run.domain = %(domain)s
      AND run.kind = 'production' AND run.created_at < %(before)s)
ORDER BY tenant.tenant_id;

-- name: claim_cycle
-- One worker at a time; the fence rises, so that a worker that went silent writes no more.
UPDATE flywheel.cycles
SET lease_owner = %(owner)s, fence = fence + 1,
    lease_until = now() + make_interval(secs => %(lease_seconds)s)
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND state = 'running'
  AND (lease_until IS NULL OR lease_until < now())
  AND (resume_at IS NULL OR resume_at < now() OR stop_requested)
RETURNING fence;

-- name: renew_lease
UPDATE flywheel.cycles
SET lease_until = now() + make_interval(secs => %(lease_seconds)s)
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'running'
RETURNING stop_requested;

-- name: release_lease
UPDATE flywheel.cycles SET lease_owner = NULL, lease_until = NULL
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s;

-- name: due_cycles
-- Cycles that can go on: nobody holds them, and their stage does not wait for unfinished runs.
SELECT cycle.tenant_id, cycle.id
FROM flywheel.cycles AS cycle
WHERE cycle.state = 'running' AND (cycle.lease_until IS NULL OR cycle.lease_until < now())
  AND (cycle.resume_at IS NULL OR cycle.resume_at < now() OR cycle.stop_requested)
  AND (cycle.stop_requested OR NOT EXISTS (
      SELECT 1
      FROM flywheel.stages AS stage
      JOIN flywheel.samples AS sample
        ON sample.tenant_id = stage.tenant_id AND sample.cycle_id = stage.cycle_id
       AND sample.stage_seq = stage.seq
      JOIN runtime.runs_v1 AS run
        ON run.tenant_id = sample.tenant_id AND run.id = sample.run_id
      WHERE stage.tenant_id = cycle.tenant_id AND stage.cycle_id = cycle.id
        AND stage.state = 'waiting' AND run.finished_at IS NULL
  ))
ORDER BY cycle.created_at;

-- name: request_stop
UPDATE flywheel.cycles SET stop_requested = true
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND state = 'running'
RETURNING id;

-- name: start_stage
-- An attempt counts where the stage begins or began and broke off, not where it waited for runs.
UPDATE flywheel.stages AS stage
SET state = 'running', started_at = coalesce(started_at, now()),
    attempts = attempts + CASE WHEN stage.state = 'waiting' THEN 0 ELSE 1 END
FROM flywheel.cycles AS cycle
WHERE stage.tenant_id = %(tenant_id)s AND stage.cycle_id = %(cycle_id)s AND stage.seq = %(seq)s
  AND cycle.tenant_id = stage.tenant_id AND cycle.id = stage.cycle_id AND cycle.fence = %(fence)s
RETURNING stage.attempts;

-- name: save_stage
UPDATE flywheel.stages AS stage
SET state = %(state)s, inputs = stage.inputs || %(inputs)s, outputs = stage.outputs || %(outputs)s,
    metrics = stage.metrics || %(metrics)s, progress = %(progress)s, reason = %(reason)s,
    finished_at = CASE WHEN %(ended)s THEN now() ELSE stage.finished_at END
FROM flywheel.cycles AS cycle
WHERE stage.tenant_id = %(tenant_id)s AND stage.cycle_id = %(cycle_id)s AND stage.seq = %(seq)s
  AND cycle.tenant_id = stage.tenant_id AND cycle.id = stage.cycle_id AND cycle.fence = %(fence)s
RETURNING stage.seq;

-- name: show_progress
UPDATE flywheel.stages AS stage SET progress = %(progress)s
FROM flywheel.cycles AS cycle
WHERE stage.tenant_id = %(tenant_id)s AND stage.cycle_id = %(cycle_id)s AND stage.seq = %(seq)s
  AND cycle.tenant_id = stage.tenant_id AND cycle.id = stage.cycle_id AND cycle.fence = %(fence)s;

-- name: give_back_stage
-- Whoever is asked to go down has not failed: the attempt does not count.
UPDATE flywheel.stages AS stage
SET state = 'pending', attempts = attempts - 1, progress = '{}'
FROM flywheel.cycles AS cycle
WHERE stage.tenant_id = %(tenant_id)s AND stage.cycle_id = %(cycle_id)s AND stage.seq = %(seq)s
  AND cycle.tenant_id = stage.tenant_id AND cycle.id = stage.cycle_id AND cycle.fence = %(fence)s;

-- name: rest
UPDATE flywheel.cycles SET resume_at = now() + make_interval(secs => %(seconds)s)
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s;

-- name: skip_stages
UPDATE flywheel.stages
SET state = 'skipped', reason = %(reason)s, finished_at = now()
WHERE tenant_id = %(tenant_id)s AND cycle_id = %(cycle_id)s
  AND (state IN ('pending', 'waiting') OR (state = 'running' AND %(names)s::text[] IS NULL))
  AND (%(names)s::text[] IS NULL OR name = ANY (%(names)s));

-- name: end_cycle
UPDATE flywheel.cycles
SET state = %(state)s, outcome = %(outcome)s, reason = %(reason)s, finished_at = now(),
    lease_owner = NULL, lease_until = NULL
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'running'
RETURNING id;
