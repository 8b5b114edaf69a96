-- Releases: switches of an alias, in the runtime's own record of them; holds on practice runs.

-- name: switch_alias
-- NULL where the alias does not resolve to the expected policy, or to the new one already.
SELECT runtime.switch_alias_v1(
    %(tenant_id)s, %(domain)s, %(alias)s, %(expected)s, %(policy)s::jsonb, %(fallback)s::jsonb,
    %(by)s, %(reason)s, true
) AS id;

-- name: get_alias
SELECT policy ->> 'id' AS policy_id FROM runtime.aliases_v1
WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND alias = %(alias)s;

-- name: get_change
SELECT id, domain, alias, before ->> 'id' AS before, after ->> 'id' AS after, changed_by, reason,
       repinned, at
FROM runtime.alias_changes_v1
WHERE tenant_id = %(tenant_id)s AND id = %(id)s;

-- name: list_changes
-- Newest first.
SELECT id, domain, alias, before ->> 'id' AS before, after ->> 'id' AS after, changed_by, reason,
       repinned, at
FROM runtime.alias_changes_v1
WHERE tenant_id = %(tenant_id)s
  AND (%(domain)s::text IS NULL OR domain = %(domain)s)
  AND (%(alias)s::text IS NULL OR alias = %(alias)s)
ORDER BY id DESC
LIMIT %(limit)s;

-- name: hold
INSERT INTO runtime.holds (name, kinds, reason, until)
VALUES (%(name)s, %(kinds)s, %(reason)s, now() + make_interval(secs => %(seconds)s))
ON CONFLICT (name) DO UPDATE
SET kinds = excluded.kinds, reason = excluded.reason, until = excluded.until;

-- name: lift_hold
-- Runners are woken: what was held may be claimed at once.
WITH lifted AS (DELETE FROM runtime.holds WHERE name = %(name)s RETURNING name)
SELECT pg_notify(%(channel)s, '') FROM lifted;
