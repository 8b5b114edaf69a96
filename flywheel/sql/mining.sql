-- What production left to learn from: feedback, failures, and the runs themselves. The runtime is
-- read through its versioned views.

-- name: mined_until
-- When the last cycle began that compiled what it mined; NULL before the first.
SELECT max(cycle.created_at) AS at
FROM flywheel.cycles AS cycle
JOIN flywheel.stages AS stage
  ON stage.tenant_id = cycle.tenant_id AND stage.cycle_id = cycle.id
WHERE cycle.tenant_id = %(tenant_id)s AND cycle.domain = %(domain)s
  AND cycle.id <> %(cycle_id)s AND stage.name = 'compile' AND stage.state = 'done';

-- name: new_feedback
-- Corrections and bad ratings of production runs that no other cycle has compiled.
SELECT feedback.run_id, feedback.seq, feedback.by, run.answer,
       CASE WHEN jsonb_typeof(feedback.correction) = 'object' THEN feedback.correction
       END AS correction
FROM runtime.feedback_v1 AS feedback
JOIN runtime.runs_v1 AS run
  ON run.tenant_id = feedback.tenant_id AND run.id = feedback.run_id
WHERE feedback.tenant_id = %(tenant_id)s AND feedback.at >= %(since)s
  AND (jsonb_typeof(feedback.correction) = 'object' OR feedback.rating = 'down')
  AND run.domain = %(domain)s AND run.kind = 'production'
  AND NOT EXISTS (
      SELECT 1
      FROM flywheel.mined AS mined
      JOIN flywheel.stages AS stage
        ON stage.tenant_id = mined.tenant_id AND stage.cycle_id = mined.cycle_id
      WHERE mined.tenant_id = feedback.tenant_id AND mined.run_id = feedback.run_id
        AND mined.seq = feedback.seq AND mined.cycle_id <> %(cycle_id)s
        AND stage.name = 'compile' AND stage.state = 'done')
ORDER BY feedback.run_id, feedback.seq;

-- name: new_failures
-- Production runs that were judged and failed, whether anybody said so or not.
SELECT run.id AS run_id, run.state
FROM runtime.runs_v1 AS run
WHERE run.tenant_id = %(tenant_id)s AND run.created_at >= %(since)s
  AND run.domain = %(domain)s AND run.kind = 'production'
  AND run.state IN ('rejected', 'timed_out')
  AND NOT EXISTS (
      SELECT 1
      FROM flywheel.mined AS mined
      JOIN flywheel.stages AS stage
        ON stage.tenant_id = mined.tenant_id AND stage.cycle_id = mined.cycle_id
      WHERE mined.tenant_id = run.tenant_id AND mined.run_id = run.id
        AND mined.seq = 0 AND mined.cycle_id <> %(cycle_id)s
        AND stage.name = 'compile' AND stage.state = 'done')
ORDER BY run.id;

-- name: mark_mined
-- A cycle that never came to compile what it mined loses it to the next one.
INSERT INTO flywheel.mined (tenant_id, run_id, seq, cycle_id, category)
SELECT %(tenant_id)s, seen.run_id, seen.seq, %(cycle_id)s, seen.category
FROM unnest(%(run_ids)s::text[], %(seqs)s::integer[], %(categories)s::text[])
  AS seen (run_id, seq, category)
ON CONFLICT (tenant_id, run_id, seq)
DO UPDATE SET cycle_id = excluded.cycle_id, category = excluded.category;

-- name: what_was_asked
-- Input and files of runs, for finding near-duplicates.
SELECT run.id AS run_id, run.task -> 'input' AS input,
       ARRAY(SELECT file.path || ' ' || encode(sha256(file.content), 'hex')
             FROM runtime.run_files_v1 AS file
             WHERE file.tenant_id = run.tenant_id AND file.run_id = run.id
             ORDER BY file.path) AS files
FROM runtime.runs_v1 AS run
WHERE run.tenant_id = %(tenant_id)s AND run.id = ANY(%(run_ids)s);

-- name: run_task
SELECT task FROM runtime.runs_v1 WHERE tenant_id = %(tenant_id)s AND id = %(run_id)s;

-- name: run_files
SELECT path, content FROM runtime.run_files_v1
WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s
ORDER BY path;

-- name: last_corrections
-- What each person said last about a run; the newest first.
SELECT by, correction
FROM (SELECT DISTINCT ON (by) by, seq, correction
      FROM runtime.feedback_v1
      WHERE tenant_id = %(tenant_id)s AND run_id = %(run_id)s
        AND jsonb_typeof(correction) = 'object'
      ORDER BY by, seq DESC) AS last
ORDER BY seq DESC;
